"""A custom tool for the shipped model `calculator`, which calls it by name."""


def calculator(expression: str) -> int:
    """Multiply two whole numbers.

    Args:
        expression: The product, such as 12*34.
    """
    first, second = expression.split("*")
    return int(first) * int(second)
