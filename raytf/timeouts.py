"""Deadlines after which a run recovers another way, or fails; and the values that are in force.

A polling interval is no deadline: it is a constant of its module, and its name ends in `_INTERVAL`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

# Throughput of a slow network, or disk, that others use; below it counts as broken.
BYTES_A_SECOND = 25e6
# Upper bound of a first step, or of the wait for the peers' one, in multiples of another process' first step.
_TIMES = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Deadlines, each in seconds. Those of recovery are for a small model; `Pace` scales them.

    Args:
        process_start: Start of a process. One that first sets up a runtime environment may need minutes.
        imports: Import of TensorFlow in a process.
        nodes: Nodes that a run lacks, where KubeRay or an autoscaler starts nodes. Later the run is refused.
        process_setup: Addresses from the worker processes, and the set-up of servers and feeds in them.
        head_answer: Answer of the cluster's head. Ray itself tries for 20 s and then reports no reason.
        idle_answer: Answer of an idle process, warm or standby. It comes at once unless the process is stopped or gone.
        model_answer: Report of a process about the model; longer than `dry_run`.
        dry_run: Build of the model, and one trial call of it.
        digest: Read of the data in memory, to compute its digest.
        core_claim: Claims of cores by another worker of the host, 1 ms each.
        cleanup: Removal of a sweep's temporary folders on other hosts.
        resources_back: Return to the cluster of the resources that warm workers have released.
        evaluator_start: Start of an evaluation.
        strategy_of_verify: Connection between the two workers of `verify`.
        verify: Comparison of one device with two workers. The result of a longer one is not reported.
        verify_error: Wait for that result at a start with verify="error"; longer than `verify`.
        verify_answer: Report of a process on the result of a comparison.
        last_epoch: Transfer of the last epoch's state from a worker of `raytf.fit`; the time of its bytes is added.
        verify_end: Wait for the comparison by a training that ends first.
        verify_thread_join: End of the thread that waits for a comparison.
        trial_answer: Begin or end of a trial in the workers, which read a checkpoint and drop graphs.
        trial_save: Checkpoint of a trial, saved by its workers.
        worker_cleanup: Clean-up of healthy workers at their end.
        same_failure: Same failure in other workers. One that failed alone leaves the others waiting in a collective.
        ring_cause: Arrival of what a lost member sent earlier, and of the first cause, after a connection broke.
        ring_join: Join of all members to the next ring, when each is known to wait for it.
        ring_stranger: Proof by a connection that it belongs to the ring.
        recovery_plan: Command of the driver to a worker that has lost another one; spans all steps of recovery.
        recovery_break: Arrival of the others at the all-reduce that the lost worker misses: the rest of a step, and
            callbacks.
        recovery_answer: Answers of workers to requests of recovery.
        recovery_checkpoint: Checkpoint of their state by the other workers.
        replacement_start: Start of a replacement worker's process, where no resources must be freed first.
        replacement_location: Preparation of a replacement worker for the step: TensorFlow, the model, graphs.
        sign_of_life: Sign of life from the live workers, when one sends none.
        silent_worker: Sign of life from a silent worker, or proof that it is gone. Others' failures are then its own.
        joiner_ready: Start of the processes that join an elastic run, which continues without them meanwhile.
        workers_leave: End of workers after a step, for another number of them. Later they are ended.
        workers_stay: End of the trainings in processes that stay, when their group has ended.
        standby_start: Import of TensorFlow by a standby worker that has begun it. Later the worker is of no use.
        host_silent: Answer of a host, or of the process monitor there. Later the host counts as gone.
        watcher_start: Start of the process monitor on a host.
        uninterruptible: Answer of a disk or a file system to a process that it blocks.
        final_report: Last reports on all workers that are about to be ended.
        stack: Stack of a worker, or the state of its process from its host.
        stack_dump: Stack of a process of this host, by py-spy.
        far_stack: Stack of a process, by another process on its host; longer than `stack_dump`.
        hang_watch_end: End of a check that runs when nothing is watched any more.
        checkpoint_write: Write of a checkpoint to slow storage: at the end of an epoch, or one that must be written.
        checkpoint_failing: Success of that write on storage that fails at first.
        checkpoint_last: Write of the last checkpoint within an epoch; the time of its bytes is added.
        checkpoint_parts: Parts of a checkpoint from other workers; or three times what this worker's part took.
        writer_end: End of the process that writes checkpoints.
        orphan_writer: Work of that process after the training's process is gone.
        orphan_writer_at_most: Total of `orphan_writer` while others use its CPU; the time of its bytes is added.
        writer_bytes_at_most: Upper bound of the bytes' time, for which a new run waits for writers that are alone.
        event_record: Write of an event into the run's folder. A slower one continues in the background.
        note_removal: Removal of a note from the storage.
        lock_silent: Renewal of a run folder's lock by its owner; longer than a slow upload, shorter than a night.
        lock_release: Release of the lock of a run's folder.
        reports_listed: List of a resumed run's reports, from the driver.
        report_old: Receipt of a report by the driver. Older ones are waited for.
        report_taken: Wait for such a report, which may wait for a checkpoint; longer than `checkpoint_write`.
        stop_answer: Answer of a worker to a stop request. It comes at once, unless the worker is frozen.
        stop_step: Message to a stopping worker after which step it ends.
        run_end: End of the run after that step, with its checkpoint.
        iterator_end: End of TensorFlow's iterators when Python exits; its own wait is 60 s.
        stream_answer: Answer of a server of rows. One that died is back within seconds, on another node if necessary.
        script_start: Start of a script's process, or the report of its location.
        script_grace: End of a script after SIGTERM.
        script_killed: End of its process after SIGKILL, which an uninterruptible wait delays.
        script_answer: Status of a script's process.
        task_cause: Failure of the task that made others fail.
        last_evaluation: Evaluation of the last checkpoint, after the training has ended.
        output_filter: End of the filter of a process' native output.
        doctor_start: Start of the doctor's processes. This and the next four are also limited by its time left.
        doctor_facts: Report of versions, limits, disks and ports.
        doctor_storage: Write, read and removal of a file in the storage.
        doctor_clock: Report of the time.
        doctor_close: End of the processes.
        link_step: One step of a conversation over a link.
        link: All steps over one link.
        name_lookup: Lookup of a host's name.
    """

    process_start: float = 900.0
    imports: float = 300.0
    nodes: float = 900.0
    process_setup: float = 300.0
    head_answer: float = 15.0
    idle_answer: float = 5.0
    model_answer: float = 900.0
    dry_run: float = 600.0
    digest: float = 600.0
    core_claim: float = 0.5
    cleanup: float = 10.0
    resources_back: float = 5.0
    evaluator_start: float = 300.0
    strategy_of_verify: float = 60.0
    verify: float = 180.0
    verify_error: float = 200.0
    verify_answer: float = 60.0
    last_epoch: float = 10.0
    verify_end: float = 10.0
    verify_thread_join: float = 5.0
    trial_answer: float = 600.0
    trial_save: float = 3600.0
    worker_cleanup: float = 5.0
    same_failure: float = 10.0
    ring_cause: float = 0.5
    ring_join: float = 30.0
    ring_stranger: float = 5.0
    recovery_plan: float = 240.0
    recovery_break: float = 30.0
    recovery_answer: float = 20.0
    recovery_checkpoint: float = 45.0
    replacement_start: float = 45.0
    replacement_location: float = 100.0
    sign_of_life: float = 3.0
    silent_worker: float = 15.0
    joiner_ready: float = 120.0
    workers_leave: float = 120.0
    workers_stay: float = 10.0
    standby_start: float = 30.0
    host_silent: float = 20.0
    watcher_start: float = 45.0
    uninterruptible: float = 300.0
    final_report: float = 15.0
    stack: float = 3.0
    stack_dump: float = 10.0
    far_stack: float = 15.0
    hang_watch_end: float = 2.0
    checkpoint_write: float = 900.0
    checkpoint_failing: float = 15.0
    checkpoint_last: float = 30.0
    checkpoint_parts: float = 5.0
    writer_end: float = 5.0
    orphan_writer: float = 30.0
    orphan_writer_at_most: float = 90.0
    writer_bytes_at_most: float = 3600.0
    event_record: float = 2.0
    note_removal: float = 5.0
    lock_silent: float = 60.0
    lock_release: float = 30.0
    reports_listed: float = 60.0
    report_old: float = 60.0
    report_taken: float = 1000.0
    stop_answer: float = 10.0
    stop_step: float = 30.0
    run_end: float = 90.0
    iterator_end: float = 90.0
    stream_answer: float = 180.0
    script_start: float = 60.0
    script_grace: float = 5.0
    script_killed: float = 5.0
    script_answer: float = 1.0
    task_cause: float = 5.0
    last_evaluation: float = 30.0
    output_filter: float = 2.0
    doctor_start: float = 20.0
    doctor_facts: float = 12.0
    doctor_storage: float = 10.0
    doctor_clock: float = 3.0
    doctor_close: float = 3.0
    link_step: float = 3.0
    link: float = 9.0
    name_lookup: float = 5.0

    def scaled(self, times: float) -> Timeouts:
        """Returns the deadlines multiplied by `times`."""
        return Timeouts(**{name: times * seconds for name, seconds in dataclasses.asdict(self).items()})


_current = Timeouts()


def get() -> Timeouts:
    """Returns the deadlines of this process, which the processes that it starts receive too."""
    return _current


def set_current(deadlines: Timeouts) -> None:
    """Sets the deadlines of this process."""
    global _current
    _current = deadlines


def call_with(deadlines: Timeouts, function: Callable, *arguments):
    """Calls a function in another process, with the deadlines of the calling one."""
    set_current(deadlines)
    return function(*arguments)


@contextlib.contextmanager
def temporarily(deadlines: Timeouts) -> Iterator[None]:
    """Sets the deadlines of this process until the context ends."""
    previous = _current
    set_current(deadlines)
    try:
        yield
    finally:
        set_current(previous)


def deadline(least: float, bytes: int = 0, first_step_seconds: float = 0.0) -> float:
    """Returns a deadline in seconds, for a model of this size and speed.

    Args:
        least: Seconds for the part that depends on no model.
        bytes: Bytes of the model's state that are sent, read or written once meanwhile.
        first_step_seconds: Seconds of a worker's first step with its compilation. It is 0 unless another process makes
            its first step, or ends a step, meanwhile.

    Returns:
        `least`, plus 1 s for each 25 MB, plus three times the first step.
    """
    return least + bytes / BYTES_A_SECOND + _TIMES * first_step_seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """Size and speed of a worker's training, from which deadlines follow.

    Args:
        bytes: Bytes of the model's and its optimizers' variables.
        first_step_seconds: Seconds from the start of the training to the end of its first step, or until now.
    """

    bytes: int = 0
    first_step_seconds: float = 0.0

    def deadline(self, least: float, copies: int = 0, first_steps: int = 0) -> float:
        """Returns the seconds for `copies` copies of the state in sequence and `first_steps` first steps."""
        return deadline(least, copies * self.bytes, first_steps * self.first_step_seconds)

    @staticmethod
    def slowest(paces) -> Pace:
        """Returns the maximum of each field."""
        return Pace(max(pace.bytes for pace in paces), max(pace.first_step_seconds for pace in paces))
