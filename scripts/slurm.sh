#!/usr/bin/env bash
# A job of SLURM that goes on by itself when it is preempted or its time is up:
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 scripts/slurm.sh --config image
#
# All arguments are those of `mmpos fit`, over trainer/ddp unless trainer/fsdp is among them, and
# trainer/cluster. One task is one process with one GPU. A minute and a half
# before the time is up, each process is sent SIGUSR1: the run saves last.ckpt after its step and puts
# the job back into the queue, where it begins again with this script and goes on. Metrics, checkpoints
# and configs of all starts lie in one folder, runs/NAME/version_<job>. Bring the environment (module
# load, source .../bin/activate) before sbatch, which hands it on.
#SBATCH --job-name=mmpos
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mmpos-%j.log
#SBATCH --cpus-per-task=8
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
again=()
if [[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]]; then
  again=(--ckpt_path last)
fi
strategy=(--config trainer/ddp)
if [[ " $* " == *trainer/fsdp* ]]; then
  strategy=()
fi
exec srun --kill-on-bad-exit=1 mmpos fit "$@" \
  "${strategy[@]}" --config trainer/cluster \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" \
  --trainer.logger.version "$SLURM_JOB_ID" "${again[@]}"
