#!/bin/sh
# Simulation and tests side by side, one core each: tools/lane.sh BIN SEEDS. The last line is pytest's own summary.
# What is left of the seeds when the tests are through runs on both cores.
set -u
bin=$1 seeds=$2
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
begin=$(date +%s)
"$bin/python" -m tests.sim --seeds "$seeds" --jobs 1 > "$logs/sim" 2>&1 &
sim=$!
{ "$bin/pytest" -m "not nightly and not gpu"; echo $? > "$logs/status"; } | tee "$logs/pytest"
kill -USR1 "$sim" 2> /dev/null
wait "$sim"; sim_status=$?
cat "$logs/sim"
echo "sim and tests together: $(($(date +%s) - begin)) s"
tail -n 1 "$logs/pytest"
test "$sim_status" = 0 && test "$(cat "$logs/status")" = 0
