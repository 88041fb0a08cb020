#!/usr/bin/env bash
#SBATCH --job-name=shardstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
#
# Submit with: sbatch examples/slurm.sh
# One task per node runs torchrun, which starts one rank per GPU (one on a node without GPUs).
# Submit it again after it ends: train.py resumes from the newest checkpoint.
set -euo pipefail
here=${SLURM_SUBMIT_DIR:-$PWD}/examples

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first:${MASTER_PORT:-29542}" \
    "$here/train.py" --folder "runs/$SLURM_JOB_NAME" "$@"
