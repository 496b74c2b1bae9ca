# shellcheck shell=bash disable=SC2034  # the launchers read these
# The paper's baseline for llama_7b_code_2k: concatenation, with attention across documents.
source "$(dirname "${BASH_SOURCE[0]}")/llama_7b_code_2k.sh"
data_impl=mmap
