"""Redis Cluster: the topology, and connections that follow keys from node to node.

    module          contents
    client          asynchronous connection: one pipeline per primary, redirections followed
    hash_slots      hash slot of a command, by a table of the commands that Perdure sends
    topology        node of each slot, discovered from any node

A redirection (MOVED, ASK) or transient refusal means that the command was not executed, so it may be sent again even
if it is not repeatable. A lost connection does not mean that, and its error goes to the caller at once.
"""
