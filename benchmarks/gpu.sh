#!/bin/sh
# Measure what docs/results/cost.md claims on a GPU, in float32 and bfloat16, eager and compiled, and print the page's
# table for each of the four. Resumable: a part whose JSON is in benchmarks/results/gpu is skipped.
#   sh benchmarks/gpu.sh                         # on CUDA; not run yet: no GPU was at hand
#   sh benchmarks/gpu.sh --smoke --device cpu    # one small model: that the command works
# Another folder for the results: --results FOLDER.
here=$(dirname "$0")
PYTHON=${PYTHON:-python}
device=cuda folder=$here/results/gpu smoke=
while [ $# -gt 0 ]; do
  case $1 in
    --device) device=$2; shift ;;
    --results) folder=$2; shift ;;
    --smoke) smoke=1 ;;
    *) echo "Unknown option $1: expected --device, --results or --smoke." >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$folder" && folder=$(cd "$folder" && pwd) && cd "$here" || exit 1
failed=0
run() { # name, command...
  name=$1; shift
  if [ -e "$folder/$name.json" ]; then echo "have $name"; return; fi
  echo "== $name"
  if "$PYTHON" "$@" --device "$device" --name "$folder/$name" > "$folder/$name.log" 2>&1; then
    rm -f "$folder/$name.log"
  else
    echo "FAILED: see $folder/$name.log"; failed=1
  fi
}
for dtype in float32 bfloat16; do
  for mode in eager compiled; do
    compile=; suffix=$dtype-$mode
    if [ -n "$smoke" ]; then
      case $suffix in
        float32-eager)
          run "latency-smoke-core-$suffix" latency.py --shape smoke --batch-sizes 1,2 --rounds 2 --threads 1 \
            --only "single,hydra last 1,hydra first,deep ensemble,predict,predict novelty"
          run "growth-members-smoke-$suffix" growth.py members --shape smoke --most 2 --rounds 2 --threads 1 ;;
        bfloat16-compiled)
          run "latency-smoke-core-$suffix" latency.py --shape smoke --batch-sizes 1 --rounds 2 --threads 1 --only "single,hydra last 1" \
            --dtype bfloat16 --compile eager ;;
      esac
      continue
    fi
    [ $mode = compiled ] && compile=--compile
    for shape in deit-tiny minilm vit-s vit-b; do
      run "latency-$shape-core-$suffix" latency.py --shape $shape --rounds 40 --warmup 5 --dtype $dtype $compile
      run "latency-$shape-rivals-$suffix" latency.py --shape $shape --set rivals --rounds 20 --warmup 5 \
        --dtype $dtype $compile
      [ $mode = compiled ] || # predict itself is not compiled
        run "latency-$shape-novelty-$suffix" latency.py --shape $shape --set novelty --rounds 40 --warmup 5 --dtype $dtype
    done
    for shape in deit-tiny minilm; do
      run "fused-vs-loop-$shape-$suffix" fused_vs_loop.py --shape $shape --rounds 40 --dtype $dtype $compile
    done
    for shape in vit-s minilm; do
      run "growth-members-$shape-$suffix" growth.py members --shape $shape --rounds 40 --dtype $dtype $compile
    done
  done
done
"$PYTHON" page.py --print "$folder" || failed=1
exit $failed
