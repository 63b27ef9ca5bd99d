"""Steps: named parts of a handler whose result is recorded once and then returned from the record."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Final, NoReturn, TypeAlias

import anyio
import orjson

from ....deadletter.burial import Evidence
from ....deadletter.policy import backoff
from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.doubts import Resolution, encode_intent, intent_arguments, intent_digest, resolution_in
from ....queues.errors import PayloadTooLarge
from ....queues.runtime import RUNTIME
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.large_values import REFERENCE
from ...errors import (
    Reschedule,
    ResolutionMismatch,
    ResultMismatch,
    StepDefinitionError,
    StepError,
    StepExited,
    StepInDoubt,
    StepMismatch,
    StepResolvedAsFailed,
    UnserialisableResult,
)
from ...log import log_wait, logger
from ..emitting import CURRENT_PART, Part, begin_part, begin_unit, end_unit
from ..handler_task import GENERATOR_EXIT, is_closing
from ..journal.failure_record import is_unhandled
from ..journal.run_events import StepFailed, StepOutdated, StepStarted
from ..journal.step_record import FAILURE, MISREAD, StepRecord
from ..journal.tool_notes import is_note
from ..run import Run
from ..step_files import Found
from ..value_loss import Misread
from .calls import call_function, constants_of, late_call, late_result, warn_if_changed
from .codec import (
    Codec,
    arguments_text,
    codec_of,
    digests_of,
    fingerprint,
    is_async,
    read_step_result,
    store_step_result,
)
from .current import CURRENT_RUN, CURRENT_STEP, AlreadyDone, Step, StepCall, StepOptions, check_call, check_name
from .failures import (
    calls_again,
    drop_failures,
    handle_failures,
    kept_entries,
    meet_failure,
    note_cut_off,
    note_failure,
)
from .keys import Match, StrictStepKeys, changed_scope, forget_steps
from .matching import check_order, gap_before, match_step
from .tool_calls import LoggedCall, close_call
from .variables import set_back

_MARKS: Final = (REFERENCE, MISREAD, FAILURE)
"""First bytes of recorded results that are no JSON."""


async def run_step(
    run: Run,
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
    tool: LoggedCall | None = None,
    caller: asyncio.Task[Any] | None = None,
    keys: list[str] | None = None,
) -> Any:
    """Return the recorded result of a step, or run it and record its result.

    Args:
        run, name, fn, args, kwargs, options: the step.
        tool: the call, if the step is a tool call, which has an event of its own; else the event is `step_completed`.
        keys: gets the key of the step.
        caller: the asyncio task that made the call, if another one may await it.
    """
    if CURRENT_RUN.get() is not run or run.stopped:
        await check_call(run, name, within=True)
    if name is not run.checked_name:
        check_name("name", name)
        run.checked_name = name
    called = fn.__func__ if isinstance(fn, MethodType) else fn  # each access to a method makes a new object
    function, codec = run.codec
    codec = codec if called is function else _codec(run, name, fn, called)
    outer, history = CURRENT_STEP.get(), run.history
    if outer is not None and not (outer.records_nested or options.risky or options.nested == "record"):
        return await _run_within(outer, name, run, fn, args, kwargs, options)
    if run.failures:
        await handle_failures(run)
    constants = constants_of(run) if run.constants is None else run.constants
    arguments = fingerprint(args, kwargs, constants)
    if outer is not None or options.step_id is not None:
        match = await _match(run, name, digests_of(args, kwargs, arguments[0], constants), options, outer)
    elif not (history.done or history.intents or history.pages):
        match = (run.keys.next(name), None, None)
    elif known := run.keys.match_next(name, arguments[0], history):
        if run.around_step is None and keys is None:
            run.active = RUNTIME.monotonic()
            key, result = known
            mark = result[:1]
            if mark != FAILURE:
                return codec.decode_record(key, result) if mark not in _MARKS else await _read(run, codec, key, result)
        match = (*known, None)
    else:
        match = await _match(run, name, digests_of(args, kwargs, arguments[0], constants), options, outer)
    if keys is not None:
        keys.append(match[0])
    if run.around_step is None:
        return await _perform(run, match, codec, fn, args, kwargs, options, arguments, tool, caller)
    former = match[1]
    recorded = former is not None and not (former[:1] == FAILURE and calls_again(run, former[1:]))
    call = (
        StepCall(name, match[0], recorded=recorded)
        if tool is None
        else StepCall(name, match[0], tool.name, recorded=recorded, call_id=tool.call_id)
    )
    return await _hooked(
        run, call, partial(_perform, run, match, codec, fn, args, kwargs, options, arguments, tool, caller, call)
    )


async def _hooked(run: Run, call: StepCall, perform: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a step, within the hooks of the middleware."""
    if run.around_step is None:
        return await perform()
    try:
        return await run.around_step(call, perform)
    except _EXITS as error:  # of a hook
        raise _as_failure(call.key, error) from error


async def _perform(
    run: Run,
    match: Match,
    codec: Codec,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
    arguments: tuple[str, bytes],
    tool: LoggedCall | None,
    caller: asyncio.Task[Any] | None,
    call: StepCall | None = None,
) -> Any:
    """Return the result of a matched step, within the hooks. arguments: digest and JSON. call: seen by the hooks."""
    key, result, former = match
    if result is not None and result[:1] != FAILURE:
        run.touch()
        return await _read(run, codec, key, result)
    digest, shown = arguments[0], arguments_text(arguments[1], run.redact)
    tries = 0 if result is None and former is None else await _meet_record(run, match, shown, options, caller)
    outer, spending = CURRENT_STEP.get(), run.spending
    if outer is None and (run.stopping or spending is not None):
        await _may_start(run)
    replicated = options.durability == "replicated"
    decided = _decision(run, key, args, kwargs, arguments, shown) if run.history.intents else None
    noted = options.intent and not options.risky and decided is None
    step = Step(
        run,
        key,
        replicated=replicated,
        tool=None if tool is None else tool.name,
        tries=tries,
        caller=caller,
        noted=(digest, shown) if noted and tool is None else None,
        records_nested=options.nested == "record",
    )
    token = CURRENT_STEP.set(step)
    try:
        try:
            run.step_began(key, digest, step)
            if noted and tool is not None:
                await run.recorder.put(*_note(run, step, tool, digest), wait=False)
            value = await (
                _call_with_retries(step, run, fn, args, kwargs, options, digest, shown, replicated=replicated)
                if decided is None
                else _resolved(step, run, codec, decided, digest, shown)
            )
        except BaseException:
            _keep_late(run, outer, step, partial(_record_late, run, step, codec, digest, shown, tool))
            raise
        finally:
            CURRENT_STEP.reset(token)
            if call is not None:
                call.attempt = step.attempt
        if spending is not None:
            await spending.step_ended()
        warn_if_changed(key, fn, args, kwargs, arguments[1])
        data, record, value, misfit = _exact_record(run, codec, value, digest, shown) or await _record(
            run, codec, key, value, (digest, shown)
        )
        workspace = run.files
        files = None if workspace is None else await workspace.find_step_change()
        entries = _entries(run, step, record, data, tool, files)
        if outer is not None:  # for the next try of the outer step
            run.history.done[key] = entries[0].value
        stored = options.durability != "async" and (files is None or not files.cut_off)
        await run.recorder.put(*entries, wait=stored, replicated=replicated, progress=True)
        run.step_recorded(stored=stored)
    except asyncio.CancelledError:  # also while the record is written
        note_cut_off(run, key, digest, shown, caller)
        raise
    finally:
        run.step_ended(key, step.attempt)
    if workspace is not None and files is not None and files.problem is not None:
        await workspace.catch_up(files, nested=outer is not None)
    if misfit is not None:
        _raise_misfit(codec, key, data, misfit)
    return value


async def _may_start(run: Run) -> None:
    """Let a step start, unless a budget is used up or the run stops: then this does not return."""
    if run.spending is not None:
        await run.spending.before_step()
    if run.stopping:
        await run.boundary()


def _raise_misfit(codec: Codec, key: str, data: bytes, misfit: UnserialisableResult) -> NoReturn:
    """Raise what each later run raises for the recorded result."""
    codec.decode_record(key, data, misfit.misread)
    raise misfit


async def _read(run: Run, codec: Codec, key: str, result: bytes) -> Any:
    """Return the recorded result of a step. Raises `ResultMismatch`, `LargeValueLost`, `DecryptionError`."""
    misread = None
    if result[:1] == MISREAD:
        record = StepRecord.decode(result[1:])
        result, misread = record.result, Misread.decode(record.misread)
    if result[:1] == REFERENCE:
        result = await read_step_result(run, key, result)
    return codec.decode_record(key, result, misread)


_Recorded: TypeAlias = tuple[bytes, bytes, Any, UnserialisableResult | None]
"""A result as JSON, its record, what the record returns, and why it returns nothing."""


def _exact_record(run: Run, codec: Codec, value: Any, digest: str, shown: str) -> _Recorded | None:
    """Return the record of a small result that is read back as it is; None for any other."""
    if (found := codec.encode_exact(value)) is None:
        return None
    record = StepRecord.encode_call(found[0], digest, shown)
    return None if len(record) > run.payload_limit else (found[0], record, found[1], None)


async def _record(run: Run, codec: Codec, key: str, value: Any, call: tuple[str, str]) -> _Recorded:
    """Return the record of a result, which is read back in a thread if it is large.

    The work of a result that cannot be read back is paid for: its record keeps it for corrected code.

    call: digest and text of the arguments.

    Raises `UnserialisableResult`, `PayloadTooLarge`.
    """
    data, checked = codec.write("step", key, value)
    record, misfit = StepRecord.encode_call(data, *call), None
    large = len(record) > run.payload_limit
    try:
        if large:
            written, value = await asyncio.to_thread(codec.read_back, "step", key, data, checked)
        else:
            written, value = codec.read_back("step", key, data, checked)
        if written is not data:
            data, record = written, StepRecord.encode_call(written, *call)
    except UnserialisableResult as error:
        misfit, value = error, None
    if large or misfit is not None:
        stored = await store_step_result(run, key, data, checked, len(record)) if large else data
        record = StepRecord(stored, *call, None if misfit is None else misfit.misread).encode()
    return data, record, value, misfit


def _decision(
    run: Run, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: tuple[str, bytes], shown: str
) -> Resolution | None:
    """Return what a person has decided about a step in doubt; None if the step is to be called.

    Raises `StepMismatch` if the decision is about a call with other arguments.
    """
    intent = run.history.intents.get(key)
    if intent is None or (decided := resolution_in(intent)) is None:
        return None
    if intent_digest(intent) not in digests_of(args, kwargs, arguments[0], constants_of(run)):
        raise StepMismatch(key, intent_arguments(intent), shown)
    if decided.decision == "run_again":
        del run.history.intents[key]  # a new intent replaces it
        return None
    return decided


async def _resolved(step: Step, run: Run, codec: Codec, decided: Resolution, digest: str, shown: str) -> Any:
    """Return the result, or raise the failure, that a person has decided on for a step in doubt.

    A failure is final before the handler sees it: what follows from it must not be decided again.

    Raises `StepResolvedAsFailed`, `ResolutionMismatch`.
    """
    if decided.decision == "result":
        return decided_result(run.id, step.key, codec, decided)
    error = StepResolvedAsFailed(step.key, decided.text)
    if not decided.read:
        intent = encode_intent(digest, shown, replace(decided, read=True))
        what = Evidence.brief(error, run.redact)
        failed = StepFailed(step=step.key, tool=step.tool, error=what.error, message=what.message)
        await run.recorder.put(Entry(Kind.INTENT, step.key, intent), run.next_entry(failed), wait=True)
        run.history.intents[step.key] = intent
    raise error


def decided_result(task_id: str, key: str, codec: Codec, decided: Resolution) -> Any:
    """Return the result that a person has decided on, in its declared type. Raises `ResolutionMismatch`."""
    try:
        return codec.decode_record(key, decided.text.encode())
    except ResultMismatch as error:
        raise ResolutionMismatch(task_id, key, codec.misfit(decided.text.encode())) from error


def _codec(run: Run, name: str, fn: Callable[..., Any], called: Callable[..., Any]) -> Codec:
    """Return the codec of a function's results, and keep it: a loop calls one function. called: without its object."""
    if not callable(fn):
        raise StepDefinitionError(f"step {name!r} must have a function, got {fn!r}: pass it and its arguments")
    codec = codec_of(fn)
    if codec.problem is not None:
        raise StepDefinitionError(f"step {name!r}: its result cannot be read back from JSON: {codec.problem}")
    run.codec = (called, codec)
    return codec


async def _run_within(
    outer: Step,
    name: str,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
) -> Any:
    """Run a step as a part of another one, which is recorded as a whole."""
    part = Step(run, outer.key, replicated=False)
    named = f"{outer.key}/{name}"
    digest = "" if is_async(fn) else fingerprint(args, kwargs, constants_of(run))[0]
    token = CURRENT_PART.set(None if options.retry is None else Part(outer, name))
    try:
        return await _call_with_retries(
            part, run, fn, args, kwargs, options, digest, "", replicated=False, called=named
        )
    finally:
        CURRENT_PART.reset(token)


async def _match(run: Run, name: str, digests: tuple[str, ...], options: StepOptions, outer: Step | None) -> Match:
    """Return the key of a called step, and its record if there is one. Raises `DecryptionError`."""
    if outer is not None:
        outer.records_nested = True
        with run.keys.within_step(outer.key, outer.scope):
            return await _match(run, name, digests, options, None)
    if options.step_id is not None:
        match = await run.keys.find(name, options.step_id, digests, run.history)
    else:
        match = await match_step(run, name, digests, rerun=options.on_mismatch == "rerun")
    key, result, former = match
    if isinstance(run.keys, StrictStepKeys) and result is None and former is None and key not in run.history.intents:
        await check_order(run, run.keys, key)
    return match


def _note(run: Run, step: Step, tool: LoggedCall, digest: str) -> tuple[Entry, Entry]:
    """Return the entries which say that a tool call is in flight."""
    step.note, counts = tool.note(run, step.key, digest)
    return step.note, counts


async def _meet_record(
    run: Run, match: Match, shown: str, options: StepOptions, caller: asyncio.Task[Any] | None
) -> int:
    """Return how many tries of a step have ended that is called although it has a record.

    Raises its recorded failure, and `StepMismatch`.
    """
    key, result, former = match
    tries = 0 if result is None else await meet_failure(run, key, result[1:], caller)
    if former is not None and not is_unhandled(former):
        await _allow_mismatch(run, key, former, shown, options)
    await run.history.read_unfinished(key)
    return tries


async def _allow_mismatch(run: Run, key: str, record: bytes, shown: str, options: StepOptions) -> None:
    """Check that a step may run again although it was recorded with other arguments. Raises `StepMismatch`.

    It may if messages have come since (see `changed_scope`), or if it followed from steps whose records are lost, which
    have run again: their events are missing before its own. A risky step has acted already.
    """
    if options.on_mismatch == "rerun" or (not options.risky and changed_scope(run.keys.within) in run.history.saved):
        return
    after_new = run.steps_recorded > 0
    if after_new and not options.risky:
        find = partial(gap_before, run.gateway, run.delivery.partition, run.id, key)
        gap = await retry_while_unavailable(find, on_wait=log_wait(f"task {run.id}", run.touch))
        if gap is not None:
            logger.bind(id=run.id).warning(
                "events {} to {} are missing from the log, Redis has lost data: recorded step {} runs again", *gap, key
            )
            await run.log_event(StepOutdated(step=key, first=gap[0], last=gap[1]))
            return
    raise StepMismatch(key, StepRecord.decode(record).arguments, shown, after_new=after_new)


def _entries(
    run: Run, step: Step, record: bytes, result: bytes, tool: LoggedCall | None, files: Found | None = None
) -> tuple[Entry, ...]:
    """Return the checkpoint entries of a finished step, which drop the steps within. Raises `PayloadTooLarge`.

    files: that the step has changed in the workspace.
    """
    parts: list[Entry] = []
    took = round((RUNTIME.monotonic() - step.began) * 1000)
    step.noted, step.recorded = None, True  # no intent follows the record, and no item
    if run.failures:
        run.failures.pop(step.key, None)
    if run.emits:
        record, parts = end_unit(run, step.key, record, within=step.records_nested)
    if step.records_nested:
        parts += forget_steps(run.keys.under(f"{step.key}/", run.history), run.history)
    if files is not None and run.files is not None:
        parts += run.files.entries(files, step.key)
    if tool is None:
        if step.note is not None or (run.history.intents and _was_noted(run, step.key)):
            parts.append(close_call(run, step.key))
        log = b'{"attempt":%d,"ms":%d}' % (step.attempt, took)
        return (Entry(Kind.DONE, step.key, record, log), *parts)
    event = run.next_entry(tool.event(run, step.key, orjson.loads(result), step.attempt, took))
    return (Entry(Kind.DONE_WITH_EVENT, step.key, record), event, tool.count(run, step.key), *parts)


def _was_noted(run: Run, key: str) -> bool:
    """Return whether an earlier run has stored that the call was in flight."""
    intent = run.history.intents.get(key)
    return intent is not None and is_note(intent)


async def _call_with_retries(
    step: Step,
    run: Run,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
    digest: str,
    shown: str,
    *,
    replicated: bool,
    called: str | None = None,
) -> Any:
    """Call the function, as often as its retry allows, or take the result that `verify` finds; return it.

    A plain function that an earlier try has left running in its thread is not called again: the try waits for it.

    called: name in errors of a step that is a part of another one, whose key it has.
    """
    variables = copy_context()
    while True:
        late = late_call(run, step, digest, called) if run.threads.late.by_task else None
        if late is None and options.risky:
            intent = run.history.intents.get(step.key)
            if intent is None or is_note(intent):
                _check_call(step.key, fn, args, kwargs)  # a wrong call must leave no doubt
                await _store_intent(step, run, encode_intent(digest, shown), replicated=replicated)
            elif done := await _resolve_doubt(step, run, args, kwargs, options, intent_arguments(intent)):
                return done.result
        try:
            try:
                if late is not None:
                    found = await late_result(run, late, digest, options.timeout)
                    if found is not None:
                        return found.result
                    continue
                if run.emits:
                    await (begin_part(run) if called else begin_unit(run, step.key, within=step.records_nested))
                return await call_function(step, run, fn, args, kwargs, options.timeout, digest, called)
            except _EXITS as error:
                raise _as_failure(called or step.key, error) from error
            finally:
                set_back(variables, fn)
        except Exception as error:
            if isinstance(error, TypeError):
                _check_call(called or step.key, fn, args, kwargs, error)
            if not await _try_again(step, run, options, error, digest, shown):
                raise


async def _store_intent(step: Step, run: Run, intent: bytes, *, replicated: bool) -> None:
    started = run.next_entry(StepStarted(step=step.key, attempt=step.attempt))
    await run.recorder.put(Entry(Kind.INTENT, step.key, intent), started, wait=True, replicated=replicated)
    run.history.intents[step.key] = intent


async def _try_again(step: Step, run: Run, options: StepOptions, error: Exception, digest: str, shown: str) -> bool:
    """Log and store that a try failed, and wait for the next one. Return whether there is one."""
    retry = options.retry
    again = retry is not None and step.attempt < retry.max_attempts and not run.stopped and retry.allows(error)
    noted = options.intent and not options.risky
    stored = await _log_failure(step, run, error, digest, shown, again=again, noted=noted)
    if retry is None or not again:
        return False
    await anyio.sleep(backoff(retry, step.attempt))
    if stored:
        await run.flush()  # a try counts in later runs before the next one starts
    _begin_next_try(step, run)
    return True


def _begin_next_try(step: Step, run: Run) -> None:
    step.attempt += 1
    step.remembered, step.enqueued = 0, None
    if step.records_nested:
        run.keys.restart(f"{step.key}/")
        if run.history.pages is not None:
            run.history.pages.forget_ahead()
    run.touch()


_EXITS: Final = (SystemExit, KeyboardInterrupt, GeneratorExit)


def _as_failure(key: str, error: BaseException) -> BaseException:
    """Return the error of a step for one that asyncio would not treat as its failure.

    If a task raises SystemExit or KeyboardInterrupt, asyncio ends the loop. Raises a GeneratorExit with which this
    coroutine is closed.
    """
    if not isinstance(error, GeneratorExit):
        return StepExited(key, error)
    if is_closing():
        raise error
    return StepError(f"step {key!r} {GENERATOR_EXIT}")


def _check_call(key: str, fn: Callable[..., Any], args: Any, kwargs: Any, error: TypeError | None = None) -> None:
    """Raise `StepDefinitionError` if the arguments do not fit the function's signature. error: with which it failed."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        options = [
            f"{name}=..."
            for name in kwargs
            if name in StepOptions.__dataclass_fields__ and name not in signature.parameters
        ]
        remedy = f"; options come before the step: ctx.options({', '.join(options)}).step(...)" if options else ""
        raise StepDefinitionError(
            f"step {key!r} calls {getattr(fn, '__qualname__', fn)}{signature} with other arguments: {problem}{remedy}"
        ) from error


async def _log_failure(
    step: Step, run: Run, error: Exception, digest: str, shown: str, *, again: bool, noted: bool
) -> bool:
    """Log and store that a try failed, with the next write and before the outcome. Return whether the try is stored.

    Args:
        digest, shown: hash and text of the arguments.
        again: another try follows.
        noted: the note of a tool call is deleted after the last one.
    """
    if run.closed or CURRENT_STEP.get() is not step:  # a part of another step
        return False
    if not again:
        step.noted = None
    kept = kept_entries(run, step.key, step.note if again else None)
    entries = note_failure(run, step.key, error, (digest, shown), step.attempt, step.caller, again=again, kept=kept)
    stored = bool(entries)
    if not stored and noted and not again and step.note is not None:
        entries = [Entry(Kind.INTENT, step.key, b"")]
    if again and step.records_nested:
        entries += drop_failures(run, f"{step.key}/")
    if not isinstance(error, Reschedule):
        what = Evidence.brief(error, run.redact)
        failed = StepFailed(step=step.key, attempt=step.attempt, tool=step.tool, error=what.error, message=what.message)
        with suppress(PayloadTooLarge):
            entries.append(run.next_entry(failed))
    if entries:
        await run.recorder.put(*entries, wait=False)
    return stored


async def _resolve_doubt(
    step: Step, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions, called_with: str
) -> AlreadyDone[Any] | None:
    if options.verify is not None:
        called = f"{step.key} (verify)"
        try:
            answer = await call_function(step, run, options.verify, args, kwargs, options.timeout, "", called)
        except TypeError as error:
            _check_call(step.key, options.verify, args, kwargs, error)
            raise
        except _EXITS as error:
            raise _as_failure(called, error) from error
        if answer is not None and not isinstance(answer, AlreadyDone):
            raise TypeError(f"verify of step {step.key!r} must return AlreadyDone(result) or None, got {answer!r}")
        return answer
    if options.in_doubt == "fail":
        raise StepInDoubt(step.key, step.idempotency_key, called_with)
    return None


def _keep_late(run: Run, outer: Step | None, step: Step, record: Callable[[Any], Awaitable[None]]) -> None:
    """Let the function of a step that is given up record its result, if it runs on in a thread."""
    if outer is None and (late := run.threads.late.find(run.id, step.key)) is not None:
        late.record = record


async def _record_late(
    run: Run, step: Step, codec: Codec, digest: str, shown: str, tool: LoggedCall | None, value: Any
) -> None:
    """Record the result of a late call, after the handler has ended."""
    data, record, _, _ = await _record(run, codec, step.key, value, (digest, shown))
    await run.recorder.put(*_entries(run, step, record, data, tool), wait=True, progress=True)
