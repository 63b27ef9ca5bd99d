"""Operations of the HTTP API and the dashboard, one module per domain. `router.load_operations` imports them all."""
