// The worker under PM2:  pm2 start deploy/pm2/ecosystem.config.cjs
// What each setting protects is in ../README.md. PERDURE_REDIS_URL comes from the environment of the first `pm2 start`.
module.exports = {
  apps: [
    {
      name: "perdure",
      script: "/opt/perdure/bin/perdure",
      args: ["worker", "run", "app.py:app", "--processes", "2", "--concurrency", "16"],
      cwd: "/srv/perdure",
      interpreter: "none",
      exec_mode: "fork",
      instances: 1,
      autorestart: true,
      stop_exit_codes: [2],
      exp_backoff_restart_delay: 100,
      max_restarts: 1000000,
      kill_timeout: 50000,
      treekill: false,
      merge_logs: true,
      env: {
        PYTHONUNBUFFERED: "1",
        PYTHONDONTWRITEBYTECODE: "1",
        PYTHONFAULTHANDLER: "1",
        PERDURE_LOG_JSON: "true",
        PERDURE_NAMESPACE: "perdure",
        PERDURE_LEASE: "15",
        PERDURE_GRACE: "30",
      },
    },
  ],
};
