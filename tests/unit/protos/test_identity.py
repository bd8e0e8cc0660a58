"""The names in certificates."""

import pytest

from diloco.rpc.identity import region_uri, regions_of


def test_a_region_is_found_again_in_the_uri_that_names_it():
    names = [region_uri("job", "us"), region_uri("job", "eu"), region_uri("b", "x")]
    assert regions_of(names, "job") == ("eu", "us")
    assert regions_of(names) == ("eu", "us", "x")


@pytest.mark.parametrize(
    "uri",
    [
        "diloco://job/region/",
        "diloco://job/region/eu/x",
        "diloco://job/regions/eu",
        "https://job/region/eu",
        "diloco://job/region/eu\n",
        " diloco://job/region/eu",
    ],
)
def test_what_is_not_quite_our_uri_names_no_region(uri):
    assert regions_of([uri], "job") == ()
