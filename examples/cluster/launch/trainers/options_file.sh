# shellcheck shell=bash disable=SC2034,SC2154  # sourced by common.sh
# A TOML file as options of examples/pretrain_gpt.py. What is set in the shell wins over it.
module=
script=$examples/pretrain_gpt.py
options=(--config "$recipe")
[ ${#data_path[@]} = 0 ] || options+=(--data-path "${data_path[@]}")
[ -z "${TOKENIZER_MODEL:-}" ] || options+=(--tokenizer-model "$TOKENIZER_MODEL")
[ -z "${TOKENIZER_TYPE:-}" ] || options+=(--tokenizer-type "$TOKENIZER_TYPE")
[ -z "${EOD_TOKEN:-}" ] || options+=(--eod-token "$EOD_TOKEN")
