"""Definition of a variational fit: its model, guide and options."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from numpyro.handlers import seed, trace

from numpyro_fed._typing import Facts, ModelArgs, PyTree
from numpyro_fed.data.mixed import MixedSilos
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.check import check_own_factorization
from numpyro_fed.density.factors import Factors
from numpyro_fed.density.fingerprint import program_hash
from numpyro_fed.privacy.differential import Privacy
from numpyro_fed.vi.config import FitConfig
from numpyro_fed.vi.expected import expected_messages, num_parameters
from numpyro_fed.vi.guides.auto_silo_normal import AutoSiloNormal
from numpyro_fed.vi.guides.learned import factored
from numpyro_fed.vi.options import Options
from numpyro_fed.vi.setup import Setup, config_of_silo, make_setup


class FitDefinition:
    """Model, guide and options of a fit, and the facts that server and silos derive from them.

    :cvar algorithm: name of the algorithm.
    """

    algorithm: str

    def __init__(self, model: Callable, guide: Callable, options: Options) -> None:
        if not callable(model):
            raise TypeError(f"expected a model (a callable), got {type(model).__name__}")
        if not callable(guide) or isinstance(guide, type):
            raise TypeError(
                f"expected a guide, e.g. fed.AutoSiloNormal(model), got {type(guide).__name__}"
            )
        self.model, self.guide = model, guide
        self._options = options.checked()
        self._setup: tuple[Silos | MixedSilos, Setup] | None = None

    @property
    def privacy(self) -> Privacy | None:
        """Privacy budget of each silo's rows."""
        return self._options.privacy

    @property
    def secure_sum(self) -> bool:
        """Flag of secure sums: over a wire the server sees only the sum of the replies."""
        return self._options.secure_sum

    @property
    def rounds_only(self) -> bool:
        """True under privacy or secure sums: a guard in each silo decides what it answers."""
        return self._options.rounds_only

    def setup(self, silos: Silos | MixedSilos) -> Setup:
        """Return the setup before the first round.

        It is kept, so that the same data are examined once.
        """
        if self._setup is None or self._setup[0] is not silos:
            self._setup = (silos, make_setup(self.model, self.guide, silos, self._options))
        return self._setup[1]

    def keep(self, silos: Silos | MixedSilos, setup: Setup) -> None:
        """Take a setup for these silos that is made already."""
        self._setup = (silos, setup)

    def planned(self, known: Silos, independent: bool) -> FitConfig:
        """Return the config of a remote silo's fit, as the silo makes it.

        See :func:`~numpyro_fed.vi.setup.config_of_silo`.
        """
        return config_of_silo(self.model, self.guide, known, self._options, independent)

    def factored(self, known: Silos) -> Factors:
        """Return the model's factors, with learned parameters as a shared argument."""
        return factored(self.model, (known,))[2][0]

    def num_parameters(self, silos: Silos) -> int:
        """Return the number of global parameters, which the guard of parameters limits."""
        config = self.planned(silos, True)
        return num_parameters(config, self.messages(config, silos))

    def messages(self, config: FitConfig, known: Silos) -> dict[str, PyTree]:
        """Return shapes and types of the messages that a silo of this fit receives."""
        return expected_messages(self.algorithm, config, self.model, known)

    def check_factors(self, silos: Silos) -> None:
        """Check the factorization on one silo's own rows."""
        _, (part,), (factors,) = factored(self.model, (silos,))
        check_own_factorization(factors, part)

    def described(self, factors: Factors, shared: ModelArgs) -> Facts:
        """Return the facts that distinguish this fit from another.

        These are its options, its guide, and the programs of its optimizers. Networks of amortized
        guides are not compared.
        """
        options = {
            k: v
            for k, v in vars(self._options).items()
            if k not in ("optim", "local_optim", "validate")
        }
        x = jax.ShapeDtypeStruct((2,), jnp.result_type(float))

        def program(optim: optax.GradientTransformation | None) -> str:
            return (
                ""
                if optim is None
                else program_hash(lambda x: optim.update(x, optim.init(x), x), x)
            )

        if isinstance(self.guide, AutoSiloNormal):
            guide = (
                f"{self.guide!r}, init_scale={self.guide.init_scale}, prefix={self.guide.prefix!r}"
            )
        else:
            rows = {
                leaf: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
                for leaf, _, spec in factors.rows
            }

            def values(key: Array, rows: dict) -> dict:
                sites = trace(seed(self.guide, key)).get_trace(**shared, **rows)
                return {k: v["value"] for k, v in sites.items() if v["type"] in ("sample", "param")}

            guide = program_hash(values, jax.random.key(0), rows)
        programs = [program(self._options.optim), program(self._options.local_optim)]
        return {
            "fit": type(self).__name__,
            "options": options,
            "guide": guide,
            "optimizers": programs,
        }
