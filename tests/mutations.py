"""Mutations of the library, each of which README's tests have to catch.

Each mutation is made in a copy of the project. Then the test files that it names run up to the
first failure. Run it before a release, or after tests were moved or dropped::

    python tests/mutations.py [--only TEXT]

It takes ten minutes on two cores, and ends with the mutations that no test caught.
"""

import argparse
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2


class Mutation(NamedTuple):
    """A change of one place of the library: file, old and new text, and test files."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # densities
    Mutation(
        "mcmc/gradients.py",
        "gradient = gradient - tuning.alpha * silo.conducive.score(theta, tuning.loc)",
        "gradient = gradient + tuning.alpha * silo.conducive.score(theta, tuning.loc)",
        "langevin law",
    ),
    Mutation(
        "mcmc/gradients.py",
        "for v in local.values()), jnp.zeros(())) + log_det",
        "for v in local.values()), jnp.zeros(()))",
        "langevin local_moves law density",
    ),
    Mutation("density/factors.py", "log_prob = log_prob * weight\n", "pass\n", "density langevin"),
    Mutation(
        "density/factors.py",
        "local[group] + vector if group in local else vector",
        "vector",
        "density check",
    ),
    Mutation("vi/bound.py", "axis=0) - math.log(num), 0.0", "axis=0), 0.0", "bound sfvi"),
    Mutation(
        "vi/bound.py",
        "path = path_doubly if num == 1 else pull_path(slope)[1]",
        "path = path_doubly",
        "bound",
    ),
    Mutation(
        "vi/bound.py",
        "config.log_prior(context.theta, params, rows) - family.log_global",
        "config.log_prior(context.theta, params, rows) + family.log_global",
        "sfvi",
    ),
    Mutation(
        "mcmc/local_moves.py",
        "jnp.sum(proposal**2 - eps**2, -1) / noise.width**2",
        "jnp.sum(proposal**2 - eps**2, -1)",
        "local_moves",
    ),
    Mutation("mcmc/local_moves.py", "0.5 * (forward - backward)", "0.0", "local_moves"),
    Mutation(
        "mcmc/leapfrog.py",
        "len(theta)))\n    return value, slope",
        "len(theta)))\n    return value, 2 * slope",
        "marginal_hmc",
    ),
    Mutation("mcmc/leapfrog.py", "1) - value - state.energy", "1) + value - state.energy", "hmc"),
    Mutation(
        "mcmc/leapfrog.py",
        "momentum = half + 0.5 * message.step_size",
        "momentum = half + message.step_size",
        "hmc",
    ),
    Mutation(
        "surrogates/gaussian.py",
        "return Gaussian(self.eta.sum(0), self.precision.sum(0))",
        "return Gaussian(self.eta.mean(0), self.precision.sum(0))",
        "surrogates langevin",
    ),
    Mutation(
        "surrogates/nested_marginal.py",
        "return own[0] + up(jax.nn.logsumexp(below",
        "return own[0] + 0.9 * up(jax.nn.logsumexp(below",
        "nested",
    ),
    # scalings
    Mutation(
        "mcmc/gradients.py",
        "view.size(group).astype(weights[group].dtype) / m",
        "view.size(group).astype(weights[group].dtype) / (m + 1)",
        "langevin law",
    ),
    Mutation(
        "mcmc/gradients.py",
        "e = pull_back(tuning, gradient) / silo.selection",
        "e = pull_back(tuning, gradient)",
        "langevin law visits",
    ),
    Mutation(
        "mcmc/langevin.py",
        "noise = jnp.sqrt(step_size) * noise",
        "noise = step_size * noise",
        "law",
    ),
    Mutation("mcmc/langevin.py", "0.5 * h * slope + xi", "h * slope + xi", "law"),
    Mutation(
        "vi/minibatch.py",
        "total.astype(jnp.result_type(float)) / count, rows)",
        "jnp.ones(()), rows)",
        "sfvi privacy amortize",
    ),
    Mutation(
        "vi/sfvi.py",
        "jax.tree.map(lambda x: x / config.num_particles, terms.context)",
        "terms.context",
        "sfvi",
    ),
    Mutation("vi/sfvi.py", "(_TAIL + 1) / (i + _TAIL)", "1 / i", "sfvi privacy"),
    Mutation(
        "vi/participation.py", "asked, 1 / probability, 0.0", "asked, 1.0, 0.0", "sfvi remote_vi"
    ),
    Mutation(
        "vi/sfvi_avg.py",
        "/ row_count(config, rows)\n    old, new",
        "* 0 + 1.0\n    old, new",
        "sfvi_avg",
    ),
    Mutation(
        "vi/conducive/silo_factor.py",
        "else asked.scale.T @ term.context.theta",
        "else asked.scale @ term.context.theta",
        "conducive amortize",
    ),
    Mutation(
        "vi/conducive/silo_factor.py",
        "0.5 * d * (1 + math.log(2 * math.pi))",
        "0.5 * d * math.log(2 * math.pi)",
        "conducive fit",
    ),
    Mutation("decentralized/push_sum.py", "mixed / weight[:, None]", "mixed", "push_sum"),
    Mutation(
        "decentralized/mixing.py",
        "return weights / total[senders], own / total",
        "return weights, own",
        "push_sum graphs",
    ),
    Mutation(
        "decentralized/mixing.py",
        "jnp.maximum(degree[:, None], degree[senders])",
        "degree[:, None]",
        "push_sum graphs",
    ),
    Mutation(
        "decentralized/nodes.py",
        "nodes.tracker + slope - nodes.slope",
        "nodes.tracker + slope",
        "push_sum",
    ),
    # noise
    Mutation(
        "mcmc/local_moves.py",
        "random.split(random.fold_in(key_units, identity))",
        "random.split(key_units)",
        "local_moves mcmc law density",
    ),
    Mutation(
        "privacy/differential.py",
        "math.sqrt(2 * self.num_rounds / _rho",
        "math.sqrt(self.num_rounds / _rho",
        "privacy",
    ),
    Mutation(
        "privacy/differential.py",
        "shrink = jnp.minimum(1.0, noise.clip / jnp.maximum(norm, 1e-30))",
        "shrink = 1.0",
        "privacy",
    ),
    Mutation(
        "privacy/differential.py", "+ noise.sd * random.normal(k", "+ random.normal(k", "privacy"
    ),
    Mutation("privacy/discrete_gaussian.py", "2 * sd * sd)", "sd * sd)", "discrete_gaussian"),
    Mutation(
        "privacy/discrete_gaussian.py",
        "one = ~(minus & (size == 0))",
        "one = np.ones(len(size), bool)",
        "discrete_gaussian",
    ),
    # privacy
    Mutation("privacy/guard.py", "spent >= self.privacy.num_rounds", "False", "privacy promises"),
    Mutation(
        "privacy/guard.py",
        "return label if self.privacy is None else hashed(label.encode(), digest.encode())",
        "return digest",
        "privacy promises",
    ),
    Mutation(
        "privacy/guard.py",
        "if self.sums and label in dict(answered):",
        "if False:",
        "privacy promises",
    ),
    Mutation("privacy/guard.py", "if before not in (None, told):", "if False:", "privacy promises"),
    Mutation(
        "privacy/secure_sum.py",
        "total + mask if name == first else total - mask",
        "total + mask",
        "privacy",
    ),
    Mutation(
        "privacy/secure_sum.py",
        "second.encode(), label, str(place)",
        "second.encode(), str(place)",
        "privacy promises",
    ),
    Mutation(
        "privacy/own_keys.py",
        "seed = secret + drawn.encode() + number",
        "seed = drawn.encode() + number",
        "promises privacy",
    ),
    Mutation(
        "privacy/own_keys.py",
        "return bytes.fromhex(hashed(made, name.encode(), rows.encode()))",
        "return made",
        "promises privacy",
    ),
    Mutation("privacy/data_guards.py", "n < self.min_rows:", "n < 0:", "promises"),
    Mutation("front/dictionary.py", "if n >= min_count}", "}", "describe"),
    # wire
    Mutation(
        "rounds/serialization.py",
        "if _checksum(memoryview(data)[body:]) != data[len(_MARK) : body]:",
        "if False:",
        "wire fuzz",
    ),
    Mutation("engines/wire.py", "if got != wanted:", "if False:", "wire"),
    Mutation(
        "engines/call_checks.py", "            if grown:\n", "            if False:\n", "wire"
    ),
    Mutation(
        "engines/call_checks.py",
        'elif fields.get("batch") is not None or',
        "elif False or",
        "wire promises",
    ),
    Mutation(
        "engines/call_checks.py",
        "if self.kept[slot].kind not in kinds:",
        "if False:",
        "promises",
    ),
    Mutation(
        "engines/call_checks.py",
        "if not is_key(call.key) or call.key.shape != ():",
        "if False:",
        "promises wire",
    ),
    # verdicts
    Mutation(
        "results/weighing.py",
        "if of_spread <= k:",
        "if True:",
        "vi_results last_round fit",
    ),
    Mutation(
        "vi/mixture.py",
        "return self.log_density(u) - stats",
        "return self.log_density(u) + stats",
        "mixture",
    ),
    Mutation(
        "vi/importance.py",
        "logsumexp(ratio, axis=0, b=share)",
        "logsumexp(ratio, axis=0, b=share[::-1])",
        "mixture",
    ),
    Mutation(
        "vi/importance.py",
        "np.minimum(value - below, 700)",
        "np.minimum(below - value, 700)",
        "silo_check",
    ),
    Mutation(
        "vi/mixture.py",
        "half * np.log1p(squares / _DEGREES)",
        "half * squares / _DEGREES",
        "mixture",
    ),
    Mutation(
        "vi/guides/marginal.py",
        "plain, rows)(theta)[0]",
        "plain, rows)(0.9 * theta)[0]",
        "marginal_guide",
    ),
    Mutation(
        "density/independence.py",
        "found = units is not None and elements_are_independent(factors, units, silos)",
        "found = units is not None",
        "marginal_guide",
    ),
    Mutation(
        "vi/proposals.py",
        "b=jnp.array([0.5, 0.25, 0.25])",
        "b=jnp.array([0.5, 0.5, 0.25])",
        "last_round fit",
    ),
    Mutation(
        "vi/proposals.py",
        "mixture = jnp.logaddexp(math.log1p(-share), math.log(share) + student - normal)",
        "mixture = jnp.zeros_like(student)",
        "last_round fit",
    ),
    Mutation("results/diagnose.py", "_MASS = 0.2", "_MASS = 0.9", "diagnostics"),
    Mutation("results/diagnose.py", "_CHANCE = 1e-4", "_CHANCE = 0.0", "diagnostics"),
    Mutation(
        "density/check.py", "_check_sum(factors, silos, seed)\n    if len", "if len", "check silos"
    ),
]


def changed(folder: Path, mutation: Mutation) -> None:
    """Make a mutation in a copy of the project.

    :raises ValueError: if the file has not the text, or has it more than once.
    """
    place = folder / "numpyro_fed" / mutation.file
    text = place.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, expected "
            "once; mend the list of tests/mutations.py"
        )
    place.write_text(text.replace(mutation.old, mutation.new))


def caught(folder: Path, mutation: Mutation) -> str:
    """Return the first test that fails in the mutated copy; empty if all pass."""
    place = folder / "numpyro_fed" / mutation.file
    kept = place.read_text()
    try:
        changed(folder, mutation)
        every = {p.stem[5:]: str(p) for p in (folder / "tests").rglob("test_*.py")}
        files = [every[name] for name in mutation.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *files]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    finally:
        place.write_text(kept)
    if done.returncode == 0:
        return ""
    lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if not lines:
        raise RuntimeError(f"pytest ended without a verdict: {done.stdout[-500:]}{done.stderr}")
    return lines[0].split(" - ")[0].split("::")[-1]


def main() -> None:
    """Make all mutations, and say which test caught each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose file has this text")
    chosen = [m for m in MUTATIONS if parser.parse_args().only in m.file]
    folders: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as temporary:
        for n in range(AT_ONCE):
            copy = Path(temporary) / str(n)
            skipped = shutil.ignore_patterns(".*", "__pycache__")
            shutil.copytree(ROOT, copy, ignore=skipped)
            folders.put(copy)

        def one(mutation: Mutation) -> bool:
            folder, start = folders.get(), time.time()
            try:
                test = caught(folder, mutation)
            finally:
                folders.put(folder)
            change = f"{mutation.old.strip()} -> {mutation.new.strip()}"
            print(
                f"{time.time() - start:4.0f} s  {test or 'NOT CAUGHT'}  {mutation.file}: {change}"
            )
            return bool(test)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(one, chosen))
    print(f"{sum(found)} of {len(found)} mutations caught")
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
