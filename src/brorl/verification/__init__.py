"""Verifiers: responses in, verdicts out.

A response passes through these modules:

1. `grade` takes trees and prompts, and passes on each distinct text once.
2. `domains.table` removes the thoughts. It also computes further terms of the reward.
3. `domains.math`, `code`, ... find the answer in the text. A `VerdictCache` knows earlier verdicts, and the verifier
   decides easy answers itself.
4. `sandbox.pool` sends all other answers to workers. `WorkerPool` calls trusted functions (`domains.formula`, a user's
   own). `ProgramPool` runs judges of untrusted programs (`domains.code_judges`). A judge is a function that gets a
   worker and runs in its own thread.
5. `sandbox.worker` has one fork server (`sandbox.server`) and its processes (`sandbox.process`), with limits of time,
   memory and output. The code inside these processes is in `sandbox.inside`.
6. On the way back, a process's `Reply` becomes a `Verdict`, and verdicts with their tree become a group.
"""
