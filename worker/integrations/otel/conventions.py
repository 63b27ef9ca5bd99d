"""Names of spans and attributes.

They are those of the semantic conventions 1.41.0, in which messaging and GenAI have the status "development": later
versions rename some of them. A change of version is a change of this file. The conventions of GenAI have moved to a
repository of their own since.

- https://github.com/open-telemetry/semantic-conventions/blob/v1.41.0/docs/messaging/messaging-spans.md
- https://github.com/open-telemetry/semantic-conventions/blob/v1.41.0/docs/gen-ai/gen-ai-agent-spans.md
- https://github.com/open-telemetry/semantic-conventions/blob/v1.41.0/docs/gen-ai/gen-ai-spans.md
- https://github.com/open-telemetry/semantic-conventions/blob/v1.41.0/docs/general/recording-errors.md

Names of spans have the name of the task in place of the queue: a queue has many tasks. Perdure does not know the
provider of a model, so `gen_ai.provider.name` is left to the instrumentation of the model's client.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.41.0"

# general

ERROR_TYPE: Final = "error.type"
EXCEPTION: Final = "exception"
"""Name of the event of an exception."""
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# messaging

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_DESTINATION_PARTITION_ID: Final = "messaging.destination.partition.id"
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_CLIENT_ID: Final = "messaging.client.id"

SYSTEM: Final = "perdure"
ENQUEUE: Final = "enqueue"
RUN: Final = "run"
CREATE: Final = "create"
"""Type of the operation that makes one message, whose context goes with it."""
PROCESS: Final = "process"

# GenAI

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
GEN_AI_TOOL_NAME: Final = "gen_ai.tool.name"
GEN_AI_TOOL_TYPE: Final = "gen_ai.tool.type"
GEN_AI_TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"

INVOKE_AGENT: Final = "invoke_agent"
EXECUTE_TOOL: Final = "execute_tool"
FUNCTION: Final = "function"
"""Type of a tool that the program itself calls."""

# Perdure's own

TASK_NAME: Final = "perdure.task.name"
TASK_ATTEMPT: Final = "perdure.task.attempt"
TASK_CRASHES: Final = "perdure.task.crashes"
TASK_RESUMED: Final = "perdure.task.resumed"
TASK_STATE: Final = "perdure.task.state"
"""State of the task after the run."""
RUN_STOP: Final = "perdure.run.stop"
"""Reason why the run ended."""
RUN_DELAY: Final = "perdure.run.delay"
"""Seconds until the next run, if one is scheduled."""
DEAD_LETTER_REASON: Final = "perdure.dead_letter.reason"
STEP_KEY: Final = "perdure.step.key"
STEP_ATTEMPT: Final = "perdure.step.attempt"
SPENT_TOKENS: Final = "perdure.spent.tokens"
SPENT_USD: Final = "perdure.spent.usd"
LINK: Final = "perdure.link"
"""Attribute of a link: `enqueue` or `previous_run`."""
PREVIOUS_RUN: Final = "previous_run"
