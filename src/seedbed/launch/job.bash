@head@

# The code at the time of submission; later changes do not affect the job.
export SEEDBED_CODE=@code@
export PYTHONPATH="$SEEDBED_CODE${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

export @trust@

# slurm.setup
@setup@

# One process per rank, with torchrun's environment variables; the first node is the master.
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=@world@ LOCAL_WORLD_SIZE=@processes@

# USR1 (time limit) is passed on, so that the run saves. TERM (preemption, scancel) reaches it directly.
warned=
trap 'warned=yes; kill -USR1 "$step"' USR1
trap : TERM
# The run folders whose checkpoints show progress.
saved() { ls -d @runs@/checkpoints/step-* 2>/dev/null; }
before=$(saved)

@step@

while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts wait
wait "$step"
status=$?

if [ -n "$warned" ] && [ "$status" -gt 128 ]; then
    if [ "$(saved)" = "$before" ]; then
        echo "seedbed: no new checkpoint was saved before the time limit, so the job is not requeued; increase slurm.time"
    else
        scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    fi
fi
exit "$status"
