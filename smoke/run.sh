#!/usr/bin/env bash
# Every architecture trains 20 steps packed and unpacked on a tiny random model.
#
#   smoke/run.sh          on the CPU
#   smoke/run.sh --gpu    on a GPU, over every attention backend
#
# PYTHON names the interpreter (default: python3). Exit code 1 if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
device=cpu
backends=(auto)
if [ "${1:-}" = --gpu ]; then
  device=cuda
  backends=($("$python" -c 'from unsloth_pack.attention import BACKENDS; print(*BACKENDS)'))
elif [ $# -gt 0 ]; then
  echo "unknown argument $1; the only one is --gpu" >&2
  exit 2
fi
failed=0
for arch in $("$python" -c 'from unsloth_pack import supported_architectures; print(*supported_architectures())'); do
  for backend in "${backends[@]}"; do
    "$python" -W ignore smoke/train_one.py "$arch" --backend "$backend" --device "$device" || failed=1
  done
done
exit $failed
