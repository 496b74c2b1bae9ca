# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's ablation of llama_13b_text_2k: concatenation, with attention inside documents.
source "$(dirname "${BASH_SOURCE[0]}")/llama_13b_text_2k_concat.sh"
document_mask=yes
