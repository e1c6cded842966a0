"""How long something is waited for before a run takes another way, or fails; and the values that are in force.

How often one looks meanwhile is no deadline: such a constant is in its module, and its name ends in `_INTERVAL`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

# What a slow network, or disk, moves while others use it; what takes longer is no longer slow but broken.
BYTES_A_SECOND = 25e6
# A process makes its first step, or waits for its peers', in at most so many times what another one took.
_TIMES = 3.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """The deadlines, each in seconds. Those of recovery are of a small model, see `Pace`.

    Args:
        process_start: a process starts; one that sets up a runtime environment first may need minutes.
        imports: a process imports TensorFlow.
        process_setup: workers' processes tell their addresses, and servers and feeds are set up in them.
        head_answer: a cluster's head answers; Ray itself tries for 20 s, and then does not say why.
        idle_answer: an idle process, warm or standby, answers, which it does at once unless it is stopped or has gone.
        model_answer: a process tells what it finds out about the model; longer than `dry_run`.
        dry_run: the model is built, and called once, to try it.
        digest: the data in memory is read to tell it from other data.
        core_claim: another worker of the host claims its cores, a millisecond each.
        cleanup: other hosts remove the temporary folders of a sweep.
        resources_back: the cluster has the resources back that warm workers have given back.
        evaluator_start: an evaluation begins.
        strategy_of_verify: the two workers of `verify` hear of each other.
        verify: one device and two workers are compared; what takes longer is not said.
        verify_error: the comparison is known, which a start with verify="error" waits for; longer than `verify`.
        verify_answer: a process tells what came of a comparison.
        last_epoch: a worker of `raytf.fit` hands over what it holds of the last epoch, without the time of its bytes.
        verify_end: a training that ends first waits for its comparison.
        verify_parting: the thread that waits for a comparison ends.
        trial_answer: workers begin or end a trial: a checkpoint is read, graphs are dropped.
        trial_save: workers keep the checkpoint of a trial.
        worker_parting: workers that are well clear up when they are ended.
        alike_failures: workers fail that fail alike; one that failed alone leaves the others waiting in a collective.
        ring_cause: what a lost member sent before arrives, and the first cause, after a connection broke.
        ring_join: all members join the next ring, when each is known to wait for it.
        ring_stranger: a connection proves that it belongs to the ring.
        recovery_plan: the driver says how a worker goes on that has lost another: all that is done meanwhile.
        recovery_break: the others come to the sum that the lost one does not make: the rest of a step, and callbacks.
        recovery_answer: workers answer what recovery asks them.
        recovery_checkpoint: the others keep a checkpoint of what they hold.
        replacement_start: a process starts in a lost one's place, where no room is needed first.
        replacement_place: it comes to the step: TensorFlow, the model, graphs.
        replacement_report: a process that takes a lost one's place in a sweep, or a call of `fit`, says where it is.
        sign_of_life: those that live say so, when one has not.
        silent_worker: one that gives no sign of life does so, or is found to be gone, before others' failures are its.
        cut_link: all workers wait for another ring, once one has told of a loss; the kernel of one whose link
            is cut without a word tells it last.
        joiner_ready: processes that are to come to an elastic run are ready, while it goes on without them.
        workers_leave: workers end after a step, for another number of them; later Ray Train ends them.
        workers_stay: processes that stay end their trainings, when their group has ended.
        standby_start: a standby process that still imports TensorFlow has done so; later it is of no use.
        host_silent: a host, or who watches there, answers; later the host has gone.
        watcher_start: who watches a host starts there.
        uninterruptible: a disk or a file system answers a process that it holds.
        last_words: all is said of workers that are about to be ended.
        stack: a worker tells its stack, or its host how the process is.
        stack_dump: py-spy takes the stack of a process of this host.
        far_stack: another process takes the stack of one on its host; longer than `stack_dump`.
        hang_watch_end: a look ends that goes on when nothing is watched any more.
        checkpoint_write: a slow storage takes a checkpoint at the end of an epoch, or one that must be written.
        checkpoint_failing: a storage that fails takes it after all.
        checkpoint_last: the last checkpoint within an epoch is written, and more for its bytes.
        checkpoint_parts: other workers write their parts of a checkpoint; or three times what this one's took.
        writer_end: the process that writes checkpoints ends.
        writer_alone: it goes on when the training's process has gone.
        writer_alone_at_most: likewise, in all, while others have its processor; without the time of its bytes.
        writer_bytes_at_most: a run that starts waits so much longer for the bytes of writers that are alone.
        event_record: an event is written into the run's folder; after that it is written beside what follows.
        note_removal: a storage removes a note.
        lock_silent: the owner of a run's folder renews its lock; long beside a slow upload, short beside a night.
        lock_release: the lock of a run's folder is given back.
        lock_taking: who takes over a lock does so, in a few lines; a mark that is older is a dead one's.
        reports_listed: the controller tells the reports of a run that goes on.
        report_old: the controller takes a report; those that are older are waited for.
        report_taken: likewise, while it may wait for a checkpoint; longer than `checkpoint_write`.
        stop_answer: a worker answers that it is to end, which it does at once, unless it stands still.
        stop_step: a worker that is to end hears after which step.
        run_end: all ends after that step, with its checkpoint.
        iterator_end: TensorFlow's iterators end as Python does; its own wait is a minute.
        stream_answer: a server of rows answers; one that has died is back within seconds, on another node if need be.
        script_start: a script's process starts, or says where it is.
        script_grace: a script ends after SIGTERM.
        script_killed: its process ends after SIGKILL, which waits for one in an uninterruptible wait.
        script_answer: a script's process says what it does.
        task_cause: the task fails for whose sake others have.
        last_evaluation: an evaluator ends its last checkpoint, when the training has ended.
        output_filter: the filter of a process' native output ends.
        doctor_start: the doctor's processes start, of the time that is left to it, as for all of it.
        doctor_facts: they tell versions, limits, disks, and ports.
        doctor_storage: they write, read and remove a file of the storage.
        doctor_clock: they tell the time.
        doctor_close: they end.
        link_step: one step of a conversation over a link.
        link: all that is done over one link.
        name_lookup: a host's name is looked up.
    """

    process_start: float = 900.0
    imports: float = 300.0
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
    verify_parting: float = 5.0
    trial_answer: float = 600.0
    trial_save: float = 3600.0
    worker_parting: float = 5.0
    alike_failures: float = 10.0
    ring_cause: float = 0.5
    ring_join: float = 30.0
    ring_stranger: float = 5.0
    recovery_plan: float = 240.0
    recovery_break: float = 30.0
    recovery_answer: float = 20.0
    recovery_checkpoint: float = 45.0
    replacement_start: float = 45.0
    replacement_place: float = 100.0
    replacement_report: float = 60.0
    sign_of_life: float = 3.0
    silent_worker: float = 15.0
    cut_link: float = 60.0
    joiner_ready: float = 120.0
    workers_leave: float = 120.0
    workers_stay: float = 10.0
    standby_start: float = 30.0
    host_silent: float = 20.0
    watcher_start: float = 45.0
    uninterruptible: float = 300.0
    last_words: float = 15.0
    stack: float = 3.0
    stack_dump: float = 10.0
    far_stack: float = 15.0
    hang_watch_end: float = 2.0
    checkpoint_write: float = 900.0
    checkpoint_failing: float = 15.0
    checkpoint_last: float = 30.0
    checkpoint_parts: float = 5.0
    writer_end: float = 5.0
    writer_alone: float = 30.0
    writer_alone_at_most: float = 90.0
    writer_bytes_at_most: float = 3600.0
    event_record: float = 2.0
    note_removal: float = 5.0
    lock_silent: float = 60.0
    lock_release: float = 30.0
    lock_taking: float = 60.0
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
        """Returns those that are so many times as long."""
        return Timeouts(**{name: times * seconds for name, seconds in dataclasses.asdict(self).items()})


_in_force = Timeouts()


def get() -> Timeouts:
    """Returns what this process waits for; what it starts is handed the same."""
    return _in_force


def put_in_force(its: Timeouts) -> None:
    """Has this process wait so long from now on."""
    global _in_force
    _in_force = its


def under(its: Timeouts, function: Callable, *arguments):
    """Calls a function in another process than the one that says what is waited for."""
    put_in_force(its)
    return function(*arguments)


@contextlib.contextmanager
def within(its: Timeouts) -> Iterator[None]:
    """Has this process wait so long, until the context ends."""
    before = _in_force
    put_in_force(its)
    try:
        yield
    finally:
        put_in_force(before)


def deadline(least: float, bytes: int = 0, first_step_seconds: float = 0.0) -> float:
    """Seconds in which something must have happened.

    Args:
        least: seconds for what depends on no model.
        bytes: of the model's state that are sent, read or written once meanwhile.
        first_step_seconds: of a worker's first step, with what compiles it, where another process makes its first one
            meanwhile, or comes to the end of a step.

    Returns:
        `least`, and more for these: a second for each 25 MB, and three times the first step.
    """
    return least + bytes / BYTES_A_SECOND + _TIMES * first_step_seconds


@dataclasses.dataclass(frozen=True)
class Pace:
    """What a worker's training is like, as far as deadlines follow from it.

    Args:
        bytes: of the model's and its optimizers' variables.
        first_step_seconds: from the begin of the training to the end of its first step; to now, before that.
    """

    bytes: int = 0
    first_step_seconds: float = 0.0

    def deadline(self, least: float, copies: int = 0, first_steps: int = 0) -> float:
        """Seconds for so many copies of the state, one after the other, and so many first steps; see `deadline`."""
        return deadline(least, copies * self.bytes, first_steps * self.first_step_seconds)

    @staticmethod
    def slowest(paces) -> Pace:
        """The most of each."""
        return Pace(max(its.bytes for its in paces), max(its.first_step_seconds for its in paces))
