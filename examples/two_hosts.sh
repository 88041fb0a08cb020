#!/usr/bin/env bash
# Train on two hosts, with one torchrun on each:
#
#   on the first:   bash examples/two_hosts.sh 0 first-host
#   on the second:  bash examples/two_hosts.sh 1 first-host
#
# Without arguments, two torchruns on this machine play the hosts and talk over localhost.
# Pass options of train.py after the first two arguments. --folder must be on a shared disk.
set -euo pipefail
here=$(dirname "$0")
ranks=${RANKS_PER_HOST:-1} # one per GPU

host() { # the host's number, the first host's address, options of train.py
    torchrun --nnodes=2 --node-rank="$1" --nproc-per-node="$ranks" \
        --master-addr="$2" --master-port="${MASTER_PORT:-29541}" "$here/train.py" "${@:3}"
}

if [ $# -ge 2 ]; then
    host "$@"
else
    host 0 localhost --folder runs/two-hosts &
    first=$!
    host 1 localhost --folder runs/two-hosts
    wait "$first"
fi
