#!/bin/sh
# Llama-2 7B on two nodes, as one might start it by hand; phaze-fast predict --plan reads it.
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \
  --num-layers 32 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
  --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --sequence-parallel \
  --use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method block \
  --recompute-num-layers 4 --lr 3e-4 --mock-data
