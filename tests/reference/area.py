"""The published area formula, term by term, in plain Python."""

L2_UM2 = dict(
    zip(
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024],
        [
            6133.98,
            8248.43,
            12610.5,
            22139.9,
            38583,
            63338.4,
            115579,
            204764,
            446565,
            897890,
            1634130,
        ],
        strict=True,
    )
)
GLB_UM2 = dict(
    zip(
        [2, 4, 8, 16, 32, 64, 128],
        [3338220, 6078640, 11952400, 23745200, 46750900, 88605700, 175423000],
        strict=True,
    )
)


def published_area_mm2(num_tc, num_vc, width, depth, glb_mib):
    """Area of a chip of the PHAZE template, mm2; vector lanes equal the width."""
    tensor = width * depth * 760.041386 + L2_UM2[max(1, width * depth // 64)]
    vector = width * 759.823853 + L2_UM2[max(1, width // 64)]
    return (num_tc * tensor + num_vc * vector + GLB_UM2[glb_mib]) / 1e6


def published_space():
    """Every (num_tc, num_vc, width, depth, glb_mib) of the published space, in grid order."""
    largest = published_area_mm2(8, 2, 128, 128, 128)
    for tc in range(13):
        for vc in range(13):
            for width in range(1, 9):
                for depth in range(1, 9):
                    for glb in range(1, 8):
                        point = (2**tc, 2**vc, 2**width, 2**depth, 2**glb)
                        area = published_area_mm2(*point)
                        single = point[0] == 1 or point[1] == 1
                        if area <= largest and (single or area >= 0.3 * largest):
                            yield point, area
