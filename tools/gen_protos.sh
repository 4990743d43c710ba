#!/usr/bin/env bash
# Regenerate protos/gen from protos/meshpb; `--check` fails if the committed code differs.
set -eu
cd "$(dirname "$0")/.."
out=protos/gen
[ "${1:-}" = --check ] && out=$(mktemp -d)
PATH="$PWD/.venv/bin:$PATH" "${PYTHON:-.venv/bin/python}" -m grpc_tools.protoc -Iprotos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  $(find protos/meshpb -name '*.proto' | sort)
find "$out/meshpb" -type d -exec sh -c 'test -e "$1/__init__.py" || echo "\"\"\"Generated protobuf code; edit protos/meshpb instead.\"\"\"" > "$1/__init__.py"' _ {} \;
touch "$out/meshpb/py.typed"
if [ "${1:-}" = --check ]; then
  diff -r -x __pycache__ "$out/meshpb" protos/gen/meshpb || { echo "protos/gen is stale: run make protos" >&2; exit 1; }
fi
