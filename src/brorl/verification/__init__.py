"""Verifiers: responses in, verdicts out.

The way of a response, by module:

- `grade`: trees and prompts. Each distinct text is verified once.
- `domains.table`: answers, the texts after thoughts. Further terms of the reward come back here.
- `domains.math`, `code`, ...: the verifier of the domain finds what the answer says. A `VerdictCache` knows what was
  decided before, and a verifier decides some answers itself.
- `sandbox.pool`: everything else goes to workers. `WorkerPool` calls trusted functions (`domains.formula`, a user's
  own), `ProgramPool` runs judges of untrusted programs (`domains.code_judges`). Both run judges
  (`sandbox.worker`). A judge is a function that gets a worker and runs in its own thread.
- `sandbox.worker`: one fork server (`sandbox.server`) and its processes (`sandbox.process`), with limits of time,
  memory and output. What runs in them is in `sandbox.inside`.
- back: a `Reply` of a process becomes a `Verdict`, and verdicts with their tree a group.
"""
