#!/usr/bin/env bash
# The variants of the tests that need GPUs, on one machine that has them; with two or more they go over nccl.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 exec "${PYTHON:-python3}" -m pytest -m gpu tests/distributed "$@"
