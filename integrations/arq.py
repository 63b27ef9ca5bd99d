"""The interface of arq: change the imports of a program that was written for arq to `perdure.integrations.arq`."""

from ..worker.integrations.arq.pool import (
    ArqJobResult as JobResult,
)
from ..worker.integrations.arq.pool import (
    ArqRedis,
    Job,
    JobDef,
    JobExecutionFailed,
    JobStatus,
    RedisSettings,
    ResultNotFound,
    create_pool,
)
from ..worker.integrations.arq.worker_settings import (
    ArqApp,
    CronJob,
    FailedJobs,
    check_health,
    create_worker,
    cron,
    func,
    run_worker,
)
from ..worker.integrations.arq.worker_settings import ArqFunction as Function
from ..worker.integrations.arq.worker_settings import ArqRetry as Retry
from ..worker.integrations.arq.worker_settings import ArqWorker as Worker

__all__ = [
    "ArqApp",
    "ArqRedis",
    "CronJob",
    "FailedJobs",
    "Function",
    "Job",
    "JobDef",
    "JobExecutionFailed",
    "JobResult",
    "JobStatus",
    "RedisSettings",
    "ResultNotFound",
    "Retry",
    "Worker",
    "check_health",
    "create_pool",
    "create_worker",
    "cron",
    "func",
    "run_worker",
]
