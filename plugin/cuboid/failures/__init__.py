"""How ranks fail: what stops one of them ends on all of them with the same error, within a bounded time.

A rank is in one of these states. No wait is longer than the last column says; T is the timeout of the process group, or
before there is one that of the launcher's environment (both are DEEPSPEED_TIMEOUT unless a script sets its own).

===================  =======================================================  =====================================
state                waits for                                                at most
===================  =======================================================  =====================================
starting             every rank, at MASTER_ADDR:MASTER_PORT                   T
failed at the start  every rank that still loads, so that it reads the        10 s; rank 0, whose process may host
                     report                                                   the store, 5 s more
in a meeting         every rank of the world, in the meeting of its number    T
failed, the first    the others: perhaps all fail alike; then it decides on   2 s
                     the outcome
failed, later        the first one's decision; then it decides itself         4 s
has the outcome      only rank 0: that the others read it                     5 s
in a step            nobody beyond the step's collectives                     T, where the backend notices nothing
there alone          the others, which wait for it in a collective of the     3 s, then 30 s until the next look, 2 s to
                     script, or in a meeting                                  confirm it
failed in a step     as "failed" above; rank 0 then lets the others read      10 s for all requests to the store,
                     the outcome                                              and rank 0 1 s more
lost a peer          the peer's report of its own failure; then it reports    1 s, or 2 s if the peer was on another
                     the loss                                                 machine; then as "failed in a step"
ended                only in a script's last error: that the rank which       3 s
                     failed first is printed first
===================  =======================================================  =====================================

``startup``: the ranks meet in a store before they make a process group, so that one which doesn't come is named, and
one which fails early is heard. Whoever reads a report raises it.

``rank_agreement``: what the rest of Cuboid calls. ``run_on_all_ranks`` surrounds what all ranks do together (loading,
saving): a meeting after each action. ``StepGuard`` surrounds the parts of a training step, where a meeting would cost
time: it costs nothing until something fails. ``end_together`` ends both before the store may end with rank 0.

``rendezvous``: one meeting. Ranks write into the process group's store, without collectives, and poll it every 0.5 to
20 ms, or less often where they are more than 80. The outcome is written once (the store compares and sets), so every
rank reads the same one: success, by the last rank to arrive; or a failure, by the first rank that had one. A rank that
has waited for 2 s looks around, and again after at most 30 s more: for processes of its machine that ended, for
failures whose reporter was killed before it decided, for a replica that is still training. In a step, ranks whose
backend notices no loss (NCCL) read the store every 0.5 s (more than 2,000 ranks: less often), and abort their groups
when another rank has failed.

``rank_failure``: what a rank writes into the store of its failure, and the error that the others raise for it.

``whereabouts``: where the others are that don't come to what a rank has begun alone. A thread looks every 0.5 s at what
its process's main thread does, and writes it into the store where it stays. ``waiting_call``: the collective of torch's
in which a thread is.

``replica_updates``: the optimizer step that each replica has begun, which shows whose data ended first.

``bounded_store``: a request to the store that isn't answered within T (after a failure: within 10 s in all) raises an
error instead of waiting; its host may be what was lost. One process answers all ranks, so those that wait for something
send it 4,000 requests per second together, however many they are, and what many of them have written is one list.

``exit_messages``: what a process that ends leaves for the user and the launcher. Imports nothing but the standard
library, since Ctrl-C may come during the imports.

``interrupts``: Ctrl-C and SIGTERM, on which all ranks agree at the end of a step. ``shielded_launcher``: a program that
runs a launcher so that they reach the ranks alone.

``launched_world``: a command's ranks, from the launcher's variables to the end of their process group, and meetings
beside work that may take longer than T.

docs/failures.md says what users see.
"""
