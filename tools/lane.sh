#!/bin/bash
# Static checks and tests in two halves side by side, one core each, then the simulation: tools/lane.sh BIN SEEDS.
# Tests that start services as processes are one half, the checks and all other tests the other. The simulation begins
# on the core of the half that is through first, and goes on on both until all SEEDS ran, on a slow machine until LANE_S
# is over (it says how many it was). The soak, five minutes that mostly wait, runs
# beside all of it from the beginning. The last line adds up pytest's own summaries.
set -u
bin=$1 seeds=$2
LANE_S=800 LEAST_S=90  # what all may take, and what the simulation gets in any case
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
trap '' USR1  # inherited by the simulation, which may be told to use both cores before it listens
begin=$SECONDS
soak=tests/mesh/test_soak.py
processes=(tests/mesh tests/compose tests/cli/test_up.py)
others=("${processes[@]/#/--ignore=}")
processes+=("--ignore=$soak")
marks='not nightly and not gpu'

part() {  # part NAME FLAGS...: its output and its status go into files
  local name=$1
  shift
  "$bin/pytest" -m "$marks" -o cache_dir="$logs/$name.cache" "$@" > "$logs/$name" 2>&1
  echo $? > "$logs/$name.part"
  mv "$logs/$name.part" "$logs/$name.status"
}

again() {  # again NAME FLAGS...: what failed beside everything else runs once more; it is told
  local name=$1
  shift
  [ "$(cat "$logs/$name.status")" = 0 ] && return
  echo "once more:"
  "$bin/pytest" -m "$marks" -o cache_dir="$logs/$name.cache" --last-failed --last-failed-no-failures none "$@"
  echo $? > "$logs/$name.status"
}

checks_and_part() {  # the checks say at once what they find; the tests run in any case
  make --no-print-directory static
  echo $? > "$logs/static.status"
  part "$@"
}

{ part soak "$soak"; again soak "$soak" > "$logs/soak.again"; } &  # at once: alone, at the end, it would take too long
soaks=$!
part processes "${processes[@]}" &
halves=$!
checks_and_part others "${others[@]}" &
wait -n $halves $!
echo "one half of the tests is through: $((SECONDS - begin)) s"
left=$((LANE_S - (SECONDS - begin)))
[ "$left" -gt "$LEAST_S" ] || left=$LEAST_S
minutes=$((left / 60)).$((left % 60 / 6))
"$bin/python" -m tests.sim --seeds "$seeds" --minutes "$minutes" --jobs 1 > "$logs/sim" 2>&1 &
sim=$!
until [ -e "$logs/processes.status" ] && [ -e "$logs/others.status" ]; do sleep 1; done
echo "the other too: $((SECONDS - begin)) s"
until ! kill -USR1 "$sim" 2> /dev/null; do sleep 3; done  # both cores, as soon as it listens
wait "$sim"
sim_status=$?
wait $soaks
cat "$logs/processes" "$logs/others" "$logs/soak" "$logs/soak.again" "$logs/sim"
again processes "${processes[@]}"
again others "${others[@]}"
echo "checks, tests and simulation together: $((SECONDS - begin)) s"
red=$sim_status
for name in static processes others soak; do
  [ "$(cat "$logs/$name.status")" = 0 ] || { echo "red: $name"; red=1; }
done
tail -qn 1 "$logs/processes" "$logs/others" "$logs/soak" | awk -v seconds=$((SECONDS - begin)) -v red=$red '
  { for (i = 2; i <= NF; i++) if ($i ~ /^(passed|failed|skipped|error|errors),?$/) { sub(",", "", $i); n[$i] += $(i - 1) } }
  END {
    if (!red && n["failed"]) { n["passed"] += n["failed"]; n["passed at the second try"] = n["failed"] }
    if (!red) delete n["failed"]
    for (k in n) line = line (line == "" ? "" : ", ") n[k] " " k
    print line " in " seconds "s"
  }'
exit $red
