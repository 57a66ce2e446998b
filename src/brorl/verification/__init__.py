"""Verifiers: responses in, verdicts out.

A response passes through these modules:

1. `grade` takes trees and prompts, and passes on each distinct response text once.
2. `domains.table` strips thoughts and computes the additional reward terms.
3. `domains.math`, `code`, ... extract the answer from the text. A `VerdictCache` returns earlier verdicts, and the
   verifier decides easy answers itself.
4. `sandbox.pool` sends all other answers to workers. `WorkerPool` calls trusted functions (`domains.formula`, or a
   user's own). `ProgramPool` runs judges of untrusted programs (`domains.code_judges`). A judge is a function that
   takes a worker and runs in its own thread.
5. `sandbox.worker` owns one fork server (`sandbox.server`) and its processes (`sandbox.process`), and enforces time,
   memory and output limits. The code inside these processes is in `sandbox.inside`.
6. On the way back, a process's `Reply` becomes a `Verdict`, and a tree with its verdicts becomes a group.
"""
