"""Facts on which a server and a silo agree before the first call."""

from numpyro_fed._typing import Facts
from numpyro_fed.data.silos import Silos
from numpyro_fed.density.fingerprint import checked, description, from_values
from numpyro_fed.engines.call_checks import Refusal
from numpyro_fed.engines.limits import MAX_ROWS


def agreed_silos(request: Facts, silos: Silos) -> Silos:
    """Return the server's silos without rows, after comparison with a silo's own facts.

    :param request: message of the server.
    :param silos: the one silo, with its rows.
    :raises Refusal: if the server's list does not agree with the silo's own facts.
    """
    name = silos.names[0]
    try:
        known = from_values(request["silos"])
        other = checked(description(known, values=True), "the server's list", MAX_ROWS)
        if sum(sum(n) for n in known.sizes.values()) > MAX_ROWS:
            raise ValueError("too many rows")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise Refusal("the server's list of silos is not put together as one") from error
    if type(request.get("server")) is not int or type(request.get("fresh")) is not bool:
        raise Refusal("the server's facts about itself are not put together as expected")
    if name not in known.names:
        raise Refusal(f"expected to be among the silos, got {list(known.names)}")
    for what, own in description(silos, values=True).items():
        if what == "shared" and other[what] != own:
            odd = sorted(k for k in {*own, *other[what]} if own.get(k) != other[what].get(k))
            raise Refusal(
                f"the server has other values than it of {odd}, which without rows= count as "
                "shared arguments, the same everywhere; expected the same value, or an entry "
                "in rows= for what is a silo's own"
            )
        if what not in ("names", "sizes") and other[what] != own:
            raise Refusal(f"the server says {what} {other[what]}, it has {own}")
    mine = {g: n[0] for g, n in silos.sizes.items()}
    theirs = {g: n[known.names.index(name)] for g, n in known.sizes.items()}
    if mine != theirs:
        raise Refusal(f"it has {mine} rows, the server says {theirs}")
    return known
