"""LangGraph on Perdure: threads and items in the key-value store, and graphs as tasks.

Users import it as `perdure.integrations.langgraph`.

saver.py        PerdureSaver: checkpoints of threads, fenced by the task that writes them
checkpoints.py  form in which a thread's checkpoints, values and writes are stored
item_store.py   PerdureStore: items by namespace and key
graph_task.py   graph_task: a graph as a task; interrupts are waits, streaming is emitting
node_scopes.py  keys of steps that nodes call, apart for each node and superstep
store_calls.py  synchronous calls of the saver and the store, and the warning of calls outside a task
"""
