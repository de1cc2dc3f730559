#!/usr/bin/env bash
# Make the hosts, features, tables and pages again, in parts that resume.
#
#   HYDRA_DATA=DATA bash experiments/reproduce.sh                  # all parts that are not done
#   bash experiments/reproduce.sh --list                           # their names
#   bash experiments/reproduce.sh host-sst2-0 'features-sst2-*'    # some of them
#   bash experiments/reproduce.sh --again novelty-sst2             # one that is done already
#
# HYDRA_WORK (../hydra-work beside the repository unless said) holds everything that is large:
# hosts/, answers/ (logits and features), logs/, done/, and kept/ with the hosts, logits and
# features of every part, compressed. HYDRA_HOSTS and HYDRA_CACHE may lie elsewhere.
# experiments/results/parts.csv says per part: when, at which commit, how many minutes (of the
# clock and of processors), how large what it kept is, and its SHA-256.
# A part that fails is said, and the others go on. One process runs at a time.
# HYDRA_DRAWS (5) draws of known data in the novelty tables; fewer if time is short.
set -u
cd "$(dirname "$0")/.." || exit 1
work="${HYDRA_WORK:-$(dirname "$PWD")/hydra-work}"
export HYDRA_HOSTS="${HYDRA_HOSTS:-$work/hosts}" HYDRA_CACHE="${HYDRA_CACHE:-$work/answers}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python}"
parts_file="${HYDRA_PARTS:-experiments/results/parts.csv}"
draws="${HYDRA_DRAWS:-5}"

# part NAME NEEDS_DATA KEEPS COMMAND...: KEEPS is a path below HYDRA_HOSTS or HYDRA_CACHE, or -
names=() needs=() keeps=() commands=()
part() {
  names+=("$1") needs+=("$2") keeps+=("$3")
  shift 3
  commands+=("$*")
}

for task in sst2 cola clinc150 cifar10; do
  for seed in 0 1 2; do
    part "host-$task-$seed" data "hosts $task/seed$seed" \
      "$python experiments/run.py finetune $task --seeds $seed"
  done
done
for task in sst2 cola cifar10 clinc150; do # second trios of the tables on least squares
  for seed in 3 4 5; do
    part "host-$task-$seed" data "hosts $task/seed$seed" \
      "$python experiments/run.py finetune $task --seeds $seed"
  done
done
part host-cifar8-0 data "hosts cifar8/seed0" "$python experiments/run.py finetune cifar8 --seeds 0"
features() {
  local folder="novelty/$1"
  case "$2" in
    0) ;;
    student) folder="novelty/$1-student" ;;
    *) folder="novelty/$1-seed$2" ;;
  esac
  part "features-$1-$2" "$3" "cache $folder" \
    "$python experiments/novelty.py features $1 --seeds $2"
}
for seed in 0 1 2 student; do
  features digits $seed -
  for task in sst2 clinc150 cifar10; do features $task $seed data; done
done
features imagenet 0 data
features cifar8 0 data
for task in digits sst2 clinc150 cifar10 imagenet cifar8; do
  part "novelty-$task" - - "$python experiments/novelty.py table $task --draws $draws"
done
part novelty-page - - \
  "$python experiments/novelty.py page && $python docs/make_tables.py"
part near data "cache near" \
  "$python experiments/near.py features && $python experiments/near.py table && $python experiments/near.py page"
part every-task data "cache every-task" \
  "$python experiments/every_task.py answers && $python experiments/every_task.py table && $python experiments/every_task.py coverage && $python experiments/every_task.py spans && $python experiments/every_task.py page"
part policy-coverage - - "$python experiments/policy_coverage.py"
# every table of run.py; their answers are kept by task in the cache
for file in experiments/tables/*.yaml; do
  table=$(basename "$file" .yaml)
  task=$(sed -n 's/^task: *//p' "$file")
  need=data
  case "$table" in digits | members | ways | selection) need=- ;; esac
  part "table-$table" $need "${task:+cache $task}" "$python experiments/run.py $table"
done
part choosing - - "$python experiments/choosing.py digits --hosts $HYDRA_HOSTS"
part teachers - - "$python experiments/teachers.py --hosts $HYDRA_HOSTS --cache $HYDRA_CACHE"
part fold-gap data - \
  "$python experiments/fold_gap.py cifar10 --examples 1200 && $python experiments/fold_gap.py cifar10 --examples 1200 --steps"
part hies data "cache hies" "$python experiments/hies.py"
part uncertainty-heads data - "$python experiments/uncertainty_heads.py"
part zero-shot-reach data - "$python experiments/zero_shot_reach.py"
part llama data - "$python experiments/llama.py --data ${HYDRA_DATA:-DATA} --work $work/llama"

if [ "${1:-}" = --list ]; then
  printf '%s\n' "${names[@]}"
  exit 0
fi
again=
if [ "${1:-}" = --again ]; then
  again=yes
  shift
fi
chosen=()
for i in "${!names[@]}"; do
  if [ $# = 0 ]; then chosen+=("$i"); fi
done
for pattern in "$@"; do
  found=
  for i in "${!names[@]}"; do
    # shellcheck disable=SC2053
    if [[ "${names[$i]}" == $pattern ]]; then
      chosen+=("$i")
      found=yes
    fi
  done
  if [ -z "$found" ]; then
    echo "No part is called $pattern. There are: ${names[*]}" >&2
    exit 2
  fi
done

mkdir -p "$work/done" "$work/logs" "$work/kept" "$HYDRA_HOSTS" "$HYDRA_CACHE"
[ -f "$parts_file" ] || echo "part,finished,commit,minutes,processor_minutes,kept_MB,sha256" > "$parts_file"
TIMEFORMAT='%R %U %S'
failed=()

keep() { # NAME, then `hosts` or `cache` and a path below it: pack it, print its size and hash
  local root=$HYDRA_CACHE packed="$work/kept/$1.tar.gz"
  [ "$2" = hosts ] && root=$HYDRA_HOSTS
  if [ ! -e "$root/$3" ]; then
    echo "0 -"
    return
  fi
  # the same files give the same bytes
  tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - "$3" |
    gzip -n -4 > "$packed.partial" && mv "$packed.partial" "$packed"
  echo "$(($(wc -c < "$packed") / 1000000)) $(sha256sum < "$packed" | cut -d' ' -f1)"
}

for i in "${chosen[@]}"; do
  name=${names[$i]}
  if [ -f "$work/done/$name" ] && [ -z "$again" ]; then continue; fi
  if [ "${needs[$i]}" = data ] && [ ! -d "${HYDRA_DATA:-}" ]; then
    echo "$name is left out: set HYDRA_DATA to the folder of the real data." >&2
    failed+=("$name")
    continue
  fi
  echo "$(date +%H:%M) $name: ${commands[$i]}"
  commit=$(git rev-parse --short=10 HEAD 2> /dev/null || echo unknown)
  if { time bash -c "${commands[$i]}" > "$work/logs/$name.log" 2>&1; } 2> "$work/logs/$name.time"; then
    minutes=$(awk 'END {printf "%.1f,%.1f", $1 / 60, ($2 + $3) / 60}' "$work/logs/$name.time")
    kept="0 -"
    if [ "${keeps[$i]}" != - ] && [ -n "${keeps[$i]}" ]; then
      # shellcheck disable=SC2086
      kept=$(keep "$name" ${keeps[$i]})
    fi
    line="$name,$(date -u +%Y-%m-%dT%H:%MZ),$commit,$minutes,${kept% *},${kept#* }"
    { grep -v "^$name," "$parts_file"; echo "$line"; } > "$parts_file.partial"
    mv "$parts_file.partial" "$parts_file"
    touch "$work/done/$name"
  else
    echo "$name failed; the end of $work/logs/$name.log:" >&2
    tail -n 3 "$work/logs/$name.log" >&2
    failed+=("$name")
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "Not done: ${failed[*]}" >&2
  exit 1
fi
