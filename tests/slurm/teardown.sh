#!/usr/bin/env bash
# Stops what setup.sh started, and takes its configuration away; the packages stay.
set -uo pipefail

home=/var/lib/seedbed-slurm
mark="# written by tests/slurm/setup.sh of seedbed"

grep -qsF "$mark" /etc/slurm/slurm.conf || { echo "slurm: nothing of ours is set up"; exit 0; }
timeout 10 scancel --user="$(id -un)" 2>/dev/null
for name in slurmd slurmctld; do
    [ -s "$home/$name.pid" ] && kill "$(cat "$home/$name.pid")" 2>/dev/null
    for _ in $(seq 50); do
        [ -e "$home/$name.pid" ] || break # it has written its state and gone
        sleep 0.2
    done
done
[ -s /run/munge/munged.pid ] && kill "$(cat /run/munge/munged.pid)" 2>/dev/null
for file in slurm.conf cgroup.conf; do
    [ "$(readlink /etc/slurm/$file)" = "$home/$file" ] && rm /etc/slurm/$file
done
rm -rf "$home"
echo "slurm: stopped"
