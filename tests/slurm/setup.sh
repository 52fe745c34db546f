#!/usr/bin/env bash
# A Slurm cluster of one node on loopback, for the tests of `--on slurm`: root, on Debian or Ubuntu. May be called again.
#   tests/slurm/setup.sh [--install]      --install: also install slurm-wlm and munge where they are missing
# Needs no systemd and no cgroups. Its files lie in /var/lib/seedbed-slurm; a Slurm that somebody configured is left alone.
# Exit status: 0 when jobs can be submitted, 3 when that is not possible here (one line says why).
set -euo pipefail

home=/var/lib/seedbed-slurm
conf=/etc/slurm/slurm.conf
mark="# written by tests/slurm/setup.sh of seedbed"

cannot() { echo "slurm: not set up: $*" >&2; exit 3; }
answers() { timeout 5 sinfo --noheader --format=%T 2>/dev/null | grep -Eq '^(idle|mixed|allocated|completing)'; }
alive() { [ -s "$home/$1.pid" ] && [ "$(cat "/proc/$(cat "$home/$1.pid")/comm" 2>/dev/null)" = "$1" ]; }
installed() { command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; } >/dev/null

[ ! -e "$conf" ] || grep -qF "$mark" "$conf" || cannot "$conf belongs to a cluster that is not for tests"
[ "$(id -u)" = 0 ] || cannot only root can start it
mkdir -p "$home"
exec 9>"$home/lock" && flock 9

if ! installed; then
    [ "${1:-}" = --install ] || cannot "slurm-wlm and munge are not installed (tests/slurm/setup.sh --install does that)"
    command -v apt-get >/dev/null || cannot this is not Debian or Ubuntu
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -qy --no-install-recommends slurm-wlm munge; } >"$home/apt.log" 2>&1 ||
        cannot "apt-get could not install slurm-wlm and munge (see $home/apt.log)"
fi

mkdir -p "$home/state" "$home/spool" "$home/log" /etc/slurm /run/munge
chown munge: /run/munge
if [ ! -s /etc/munge/munge.key ]; then
    dd if=/dev/urandom of=/etc/munge/munge.key bs=128 count=1 status=none
    chown munge: /etc/munge/munge.key
    chmod 400 /etc/munge/munge.key
fi

# Two jobs fit for every core, and nobody counts memory: tests are small, and must not wait for each other.
cat >"$home/slurm.conf" <<CONF
$mark
ClusterName=seedbed
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
CommunicationParameters=NoInAddrAny
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=300
SlurmdTimeout=300
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
SlurmctldLogFile=$home/log/slurmctld.log
SlurmdLogFile=$home/log/slurmd.log
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$((2 * $(nproc))) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
CONF
# Older versions must name a plugin; that of cgroup v1 touches nothing unless something asks for it.
version=$(slurmd -V | tr -dc '0-9.')
plugin=$([ "$(printf '%s\n' 23.02 "$version" | sort -V | head -n 1)" = 23.02 ] && echo disabled || echo cgroup/v1)
echo "CgroupPlugin=$plugin" >"$home/cgroup.conf"
ln -sf "$home/slurm.conf" "$conf"
[ -e /etc/slurm/cgroup.conf ] || ln -sf "$home/cgroup.conf" /etc/slurm/cgroup.conf

munge -n >/dev/null 2>&1 || runuser -u munge -- munged 9>&- || cannot munged does not start
alive slurmctld || slurmctld 9>&- || cannot "slurmctld does not start (see $home/log/slurmctld.log)"
alive slurmd || slurmd 9>&- || cannot "slurmd does not start (see $home/log/slurmd.log)"

for _ in $(seq 60); do
    if answers; then
        echo "slurm: one node on loopback is ready"
        exit 0
    fi
    scontrol update NodeName="$(hostname -s)" State=RESUME >/dev/null 2>&1 || true
    sleep 0.5
done
cannot "the node does not come up (see $home/log/)"
