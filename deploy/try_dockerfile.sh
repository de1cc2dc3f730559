#!/usr/bin/env bash
# Run the steps of deploy/Dockerfile in a fresh environment, where there is no container engine:
# build the wheel, install it as the RUN lines do, start the ENTRYPOINT on a folder, ask it once.
#
#   deploy/try_dockerfile.sh FOLDER        # a saved ensemble
#
# Not tried: the base image, the user, HEALTHCHECK. PIP_ARGS may hold options for pip.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$(realpath "${1:?give the folder of a saved ensemble}")
work=$(mktemp -d)
server=""
finish() { [ -z "$server" ] || kill "$server" 2> /dev/null || true; rm -rf "$work"; }
trap finish EXIT

python3 -m venv "$work/venv"
export PATH="$work/venv/bin:$PATH"
unset PYTHONPATH
mkdir "$work/tmp"
# shellcheck disable=SC2086
python3 -m pip wheel --quiet --no-deps ${PIP_ARGS:-} --wheel-dir "$work/tmp" .

# Every RUN line but useradd, with /tmp and the CPU index put in their place.
grep '^RUN ' deploy/Dockerfile | grep -v useradd | sed 's/^RUN //' | while read -r step; do
    step=${step//\/tmp\//$work/tmp/}
    step=${step//--extra-index-url https:\/\/download.pytorch.org\/whl\/cpu/${PIP_ARGS:-}}
    echo "+ $step"
    (cd "$work" && bash -euc "$step" | tail -n 2)
done

# shellcheck disable=SC2046
eval $(grep '^ENV ' -A 3 deploy/Dockerfile | tr -d '\\\n' | sed 's/^ENV/export/')
entry=$(sed -n 's/^ENTRYPOINT //p' deploy/Dockerfile)
mapfile -t command < <(python3 -c 'import json,sys; print(*json.loads(sys.argv[1]), sep="\n")' "$entry")
token=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')
(umask 077 && echo "$token" > "$work/token")
for i in "${!command[@]}"; do
    case ${command[$i]} in
        /model) command[i]=$model ;;
        /run/secrets/token) command[i]=$work/token ;;
    esac
done
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
echo "+ ${command[*]} --port $port"
(cd "$work" && exec "${command[@]}" --port "$port") &
server=$!
for _ in $(seq 120); do
    python3 -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/v2/health/ready')" 2> /dev/null && break
    kill -0 "$server"
    sleep 0.5
done
python3 - "$port" "$token" <<'ASK'
import json, sys, urllib.request

base, token = f"http://127.0.0.1:{sys.argv[1]}", {"authorization": f"Bearer {sys.argv[2]}"}
asked = urllib.request.Request(f"{base}/v2/models/ensemble", headers=token)
model = json.load(urllib.request.urlopen(asked))
kind = model["inputs"][0]["name"]
if kind == "text":
    body, content = json.dumps({"text": "a quiet little film"}).encode(), "application/json"
else:
    import io
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 120, 150)).save(stream, "PNG")
    body, content = stream.getvalue(), "image/png"
request = urllib.request.Request(f"{base}/predict", body, {"content-type": content, **token})
print(json.dumps(json.load(urllib.request.urlopen(request))["answers"][0]))
ASK
kill -TERM "$server"
wait "$server"
server=""
echo "The steps of the Dockerfile work, and the service stopped with code 0."
