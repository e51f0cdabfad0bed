"""The best parallel plans of a model on 16 GPUs, and what each stage of the fastest holds."""

import phaze_fast as pf

model = pf.models.load("llama2-13b")
cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
step = pf.Training(global_batch=128, micro_batch=(1, 2), zero=(0, 1))

plans = pf.plan(model, cluster, step, top=5)
for plan in plans.plans:
    print(plan, f"{plan.mfu:.1%}")

print()
for k, stage in enumerate(plans.best.stages):
    gib = {term: round(size / 2**30, 1) for term, size in stage.memory.items() if size}
    print(k, stage.kinds, stage.recompute, f"{stage.load_s * 1e3:.1f} ms", gib)
