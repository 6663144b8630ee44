#!/bin/bash
# interactive, in the foreground
salloc --job-name=interactive --time=1-00:00:00 --no-kill --nodes=3 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 asyncrl-train experiment=qwen3_8b model.path=/models/Qwen3-8B task.train_file=/data/train.jsonl cluster=slurm cluster.gpus=8 slurm.time=1-00:00:00 slurm.requeues=10 trainer.data_parallel=8 rollout.batch_groups=128 run.dir=runs/interactive
