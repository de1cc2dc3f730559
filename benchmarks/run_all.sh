#!/bin/sh
# Run every benchmark on an idle machine, about 25 minutes on 2 cores. Resumable: a part whose JSON is there is skipped.
#   PYTHON=python sh benchmarks/run_all.sh
cd "$(dirname "$0")" || exit 1
PYTHON=${PYTHON:-python}
mkdir -p results
run() { # name, command...
  name=$1; shift
  if [ -e "results/$name.json" ]; then echo "have $name"; return; fi
  echo "== $name"; start=$(date +%s)
  "$PYTHON" "$@" > "results/$name.log" 2>&1 && rm -f "results/$name.log" || echo "FAILED: see results/$name.log"
  echo "   $(( $(date +%s) - start )) s"
}
latency() { # shape set batch rounds warmup [options]
  shape=$1; set_=$2; b=$3; rounds=$4; warmup=$5; shift 5
  run "latency-$shape-$set_-b$b" latency.py --shape "$shape" --set "$set_" --batch-sizes "$b" \
    --rounds "$rounds" --warmup "$warmup" "$@"
}
for shape in deit-tiny minilm; do
  run "fused-vs-loop-$shape" fused_vs_loop.py --shape $shape --rounds 20
  latency $shape core 1 30 2
  latency $shape core 8 15 1
  latency $shape core 32 8 1
done
latency vit-s core 1 30 2
latency vit-s core 8 12 1
latency vit-s core 32 8 1
small="single,single readout,hydra last 2"
latency vit-b core 1 20 1
latency vit-b core 8 7 0 --only "$small"
latency vit-b core 32 4 0 --only "$small"
for shape in vit-s minilm; do # DeiT-tiny has three heads: only three members with one each differ
  run "growth-members-$shape" growth.py members --shape $shape --rounds 20
done
run growth-tokens-minilm growth.py tokens --rounds 12 --max-seconds 12
for shape in deit-tiny minilm; do
  latency $shape rivals 1 10 1
  latency $shape rivals 8 5 1
done
few="single,hydra first,hydra first all tokens,deep ensemble"
latency deit-tiny rivals 32 3 0
latency minilm rivals 32 3 0 --only "$few"
latency vit-s rivals 1 10 1
latency vit-s rivals 8 3 0
latency vit-b rivals 1 5 0
latency vit-b rivals 8 3 0 --only "single,hydra first all tokens,deep ensemble"
run bfloat16-vit-s latency.py --shape vit-s --only "single,single readout,hydra last 2,deep ensemble" \
  --batch-sizes 1 --rounds 5 --warmup 1 --dtype bfloat16 --name bfloat16-vit-s
latency vit-s rivals 32 2 0
"$PYTHON" page.py
