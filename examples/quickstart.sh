#!/usr/bin/env bash
# From source files to a trained model in one command: installs, makes a corpus and a tokenizer, preprocesses, trains on
# all GPUs (or on two CPU ranks), stops, resumes, and checks that the resumed run has the same losses.
#
#   bash examples/quickstart.sh
#
# PYTHON is the interpreter (default python3). Everything is written to the folder quickstart/, which is replaced.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=quickstart
train_iters=80
stop_at=40

say() { printf '\n== %s\n' "$*"; }

say "Installing into .venv"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[preprocess,deepspeed]'
export PATH="$PWD/.venv/bin:$PATH"

say "Making a corpus and a tokenizer in $out"
rm -rf "$out"
mkdir -p "$out"
python examples/quickstart/data.py "$out"

say "Preprocessing"
python tools/preprocess_bfp.py \
    --input "$out/corpus.jsonl" --output-prefix "$out/python" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer.json" --eod-token '<|endoftext|>' \
    --append-eod --workers 2 --seq-length 1024 --split 969,30,1
python -m megatron_bfp verify "$out/python_text_document"

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus > 0 ? gpus : 2))
[ "$gpus" -gt 0 ] || export OMP_NUM_THREADS=$((($(nproc) + 1) / 2))
export PYTHONWARNINGS=ignore

train() { # a name for the log, then options
    local name=$1
    shift
    deepspeed --num_gpus "$ranks" --log_level warning examples/pretrain_gpt.py \
        --num-layers 2 --hidden-size 192 --num-attention-heads 6 --group-query-attention --num-query-groups 2 \
        --micro-batch-size 2 --global-batch-size $((4 * ranks)) --seq-length 1024 --train-iters $train_iters \
        --lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 8 --zero-stage 1 --num-workers 1 \
        --data-impl bfp --data-path "$out/python_text_document" --split 969,30,1 \
        --tokenizer-model "$out/tokenizer.json" --eod-token '<|endoftext|>' "$@" 2>&1 | tee "$out/$name.log"
}

say "Training $train_iters steps on $ranks ranks"
train uninterrupted
say "The same run, stopped after $stop_at steps"
train first_half --save "$out/checkpoints" --exit-interval $stop_at
say "Resuming it"
train resumed --save "$out/checkpoints" --load "$out/checkpoints"

say "Comparing"
python examples/quickstart/check.py "$out/uninterrupted.log" "$out/first_half.log" "$out/resumed.log"

say "Done. Everything is in $PWD/$out"
cat <<END
  corpus.jsonl, tokenizer.json     the documents and the tokenizer
  python_text_document.bin, .idx   the tokenized dataset, as Megatron reads it
  python_text_document.bfp/        the sequence index of each split
  checkpoints/                     DeepSpeed checkpoints
  *.log                            the three runs
END
