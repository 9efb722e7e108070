MAX_BF16_TRUNCATE_NORMAL_REL = 2.0**-7  # bfloat16 keeps 8 bits of the mantissa: the largest relative error of cutting the rest
