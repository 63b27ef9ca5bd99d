"""The interface of arq: programs that were written for arq enqueue and run their jobs as tasks.

pool.py             RedisSettings, create_pool, ArqRedis, Job: the side that enqueues
worker_settings.py  WorkerSettings as an app; func, cron, Retry, Worker, run_worker
"""
