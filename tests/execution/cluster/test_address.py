"""The address of a Ray cluster."""

import pytest

from autotune.errors import InvalidInput
from autotune.execution.cluster.address import check_address, host_and_port


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001", "10.0.0.7:6379"])
def test_addresses_as_ray_takes_them_are_taken(address):
    check_address(address)


@pytest.mark.parametrize(
    "address",
    [
        *["", "head", "ray://", "ray://head", "http://head:10001", "ray://head:99999", "AUTO"],
        *["a:b", "ray://head:10001/x", "ray://me@head:10001", "ray://[::1"],
    ],
)
def test_anything_else_is_an_error_that_names_it(address):
    with pytest.raises(InvalidInput, match="is not the address of a Ray cluster") as caught:
        check_address(address)
    assert repr(address) in caught.value.message


def test_an_address_of_ipv6_has_brackets():
    assert host_and_port("ray://[::1]:10001") == ("::1", 10001)
