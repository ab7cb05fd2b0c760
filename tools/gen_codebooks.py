"""Solve for the Lloyd-Max codebooks, train the trellis tables, and write them as JSON or C.

Without options, writes codebooks.json and trellis.json in kvcodec/reference/data. With --check,
compares these files with a fresh solution. With --c-header FILE, writes what is shipped as a C99
header for engines.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvcodec import _backend, trellis
from kvcodec.codebook import BITS, HEAD_DIMS, Codebook, from_record
from kvcodec.reference.codebook_solver import distortion, lloyd_max, snap
from kvcodec.reference.trellis_training import train, unit_of

DATA = Path(__file__).resolve().parents[1] / "kvcodec" / "reference" / "data" / "codebooks.json"
TRELLIS_DATA = DATA.with_name("trellis.json")

# Of the seeds 0 to 23 for 2 bits and 0 to 5 for 3 and 4 bits, those that gave the least error.
TRELLIS_SEEDS = {2: 21, 3: 4, 4: 5}

# Special functions differ in their last bits between versions of libm and SciPy.
TOLERANCE = 1e-12

DESCRIPTION = (
    "Lloyd-Max codebooks of a coordinate of a uniform unit vector, by head_dim and bits: the "
    "positive halves of the centroids and of the integer levels, the step of the levels, and the "
    "mean squared errors times head_dim. Written by tools/gen_codebooks.py."
)

TRELLIS_DESCRIPTION = (
    "Levels of trellis codes by bits: those of the windows 0 to 127, of which the windows 128 to "
    "255 have the negatives; the unit of the levels for elements of variance 1; and the mean "
    "squared error. Written by tools/gen_codebooks.py."
)

Record = dict[str, Any]
Tables = dict[str, dict[str, Record]]

HEADER = """\
/* Lloyd-Max codebooks and trellis codes for the coordinates of a randomly rotated unit vector.
 *
 * Written by tools/gen_codebooks.py of kvcodec; do not edit. C99, no other files are needed.
 *
 * To quantize a vector x of head_dim coordinates, rotate it, then with
 *
 *     const kvcodec_codebook *book = kvcodec_find_codebook(head_dim, bits);
 *     double unit = norm * book->step;
 *
 * where norm is the Euclidean norm of x, the code of x[i] is the number of boundaries less than
 * x[i] / unit:
 *
 *     int code = 0;
 *     while (code < book->num_levels - 1 && book->boundaries[code] < x[i] / unit) ++code;
 *
 * The code stands for the value book->levels[code] * unit. A dot product with a code vector is
 * therefore a sum of products with int8 levels, multiplied by unit once. A zero vector has no
 * direction: store norm = 0 and any codes.
 *
 * For the very codes of kvcodec, round unit to float and then up to the next bfloat16 (or not, for
 * float32 scales), and compare the boundaries with the float product x[i] * (1.0f / unit).
 *
 * A trellis code decodes element i by the last bits of a stream up to its own, see
 * kvcodec_trellis_level() below: to that level times norm * trellis->unit / sqrt(head_dim).
 */
#ifndef KVCODEC_CODEBOOKS_H
#define KVCODEC_CODEBOOKS_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvcodec_codebook {
    int head_dim;          /* dimension of the vectors */
    int bits;              /* bits of a code */
    int num_levels;        /* 2^bits, the number of entries that are used below */
    double boundaries[15]; /* num_levels - 1 boundaries, ascending, in units of step */
    double centroids[16];  /* optimal values on the unit sphere, before snapping to levels */
    int8_t levels[16];     /* values in units of step, ascending */
    double step;           /* size of one level for a vector of norm 1 */
    double mse;            /* mean squared error of a vector of norm 1 */
} kvcodec_codebook;

#define KVCODEC_NUM_CODEBOOKS %(count)d

static const kvcodec_codebook kvcodec_codebooks[KVCODEC_NUM_CODEBOOKS] = {
%(entries)s
};

/* Return the codebook, or NULL if there is none for this head_dim and bits. */
static inline const kvcodec_codebook *kvcodec_find_codebook(int head_dim, int bits)
{
    int i;
    for (i = 0; i < KVCODEC_NUM_CODEBOOKS; ++i) {
        const kvcodec_codebook *book = &kvcodec_codebooks[i];
        if (book->head_dim == head_dim && book->bits == bits) {
            return book;
        }
    }
    return NULL;
}

typedef struct kvcodec_trellis {
    int bits;           /* bits of the stream that an element owns */
    double unit;        /* size of one level for elements of variance 1 */
    double mse;         /* mean squared error of Gaussian vectors of 128 such elements */
    int8_t levels[128]; /* of the windows 0 to 127; that of window w + 128 is -levels[w] */
} kvcodec_trellis;

#define KVCODEC_NUM_TRELLISES %(trellis_count)d

static const kvcodec_trellis kvcodec_trellises[KVCODEC_NUM_TRELLISES] = {
%(trellis_entries)s
};

/* Return the trellis code, or NULL if there is none for this number of bits. */
static inline const kvcodec_trellis *kvcodec_find_trellis(int bits)
{
    int i;
    for (i = 0; i < KVCODEC_NUM_TRELLISES; ++i) {
        if (kvcodec_trellises[i].bits == bits) {
            return &kvcodec_trellises[i];
        }
    }
    return NULL;
}

/* Return the level of element i of a vector of head_dim elements, whose bits are the ring of
 * head_dim * bits bits at `stream`, little end first. The window of an element is the byte of the
 * last 8 bits up to and including its own. */
static inline int kvcodec_trellis_level(const kvcodec_trellis *trellis,
                                        const unsigned char *stream, int head_dim, int i)
{
    int total = head_dim * trellis->bits, start = (i + 1) * trellis->bits - 8, j, window = 0;
    for (j = 0; j < 8; ++j) {
        int bit = (start + j + total) %% total;
        window |= (stream[bit / 8] >> bit %% 8 & 1) << j;
    }
    return window < 128 ? trellis->levels[window] : -trellis->levels[window - 128];
}

#endif /* KVCODEC_CODEBOOKS_H */
"""


def solve(head_dim: int, bits: int) -> Record:
    """Solve for one codebook."""
    centroids = lloyd_max(head_dim, bits)
    levels, step = snap(head_dim, centroids)
    return {
        "centroids": centroids.tolist(),
        "levels": levels.tolist(),
        "step": step,
        "mse": float(distortion(head_dim, levels * step)),
        "unsnapped_mse": float(distortion(head_dim, centroids)),
    }


def solve_all() -> Tables:
    """Solve for every codebook that is shipped."""
    return {str(dim): {str(bits): solve(dim, bits) for bits in BITS} for dim in HEAD_DIMS}


def train_all() -> dict[str, Record]:
    """Train every trellis table that is shipped, by the fast path where it is installed."""
    quantize = _backend.resolve().quantize_trellis
    records = {}
    for bits in trellis.BITS:
        levels, error = train(bits, TRELLIS_SEEDS[bits], quantize)
        half = levels[: levels.size // 2].tolist()
        records[str(bits)] = {"levels": half, "unit": unit_of(bits), "mse": error}
    return records


def trellis_to_json(tables: dict[str, Record]) -> str:
    """Format the trellis tables, one a line."""
    lines = ",\n".join(f'  "{bits}": {json.dumps(table)}' for bits, table in tables.items())
    description = json.dumps(TRELLIS_DESCRIPTION)
    return f'{{\n "description": {description},\n "tables": {{\n{lines}\n }}\n}}\n'


def to_json(tables: Tables) -> str:
    """Format the tables with one codebook a line, so that differences are easy to read."""
    groups = []
    for dim, books in tables.items():
        lines = ",\n".join(f'   "{bits}": {json.dumps(book)}' for bits, book in books.items())
        groups.append(f'  "{dim}": {{\n{lines}\n  }}')
    body = ",\n".join(groups)
    return f'{{\n "description": {json.dumps(DESCRIPTION)},\n "codebooks": {{\n{body}\n }}\n}}\n'


def read(path: Path, name: str = "codebooks") -> Any:
    """Read the tables of this name from a file that was formatted here."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[name]
    except FileNotFoundError:
        raise click.ClickException(f"{path} does not exist") from None
    except (ValueError, KeyError, TypeError):
        raise click.ClickException(f"{path} is not a file of codebooks") from None


def differences(expected: Any, found: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each value that differs: integers exactly, floats beyond TOLERANCE."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected | found:
            place = f"{where}, {key}" if where else str(key)
            if key not in found:
                yield f"{place}: missing"
            elif key not in expected:
                yield f"{place}: not expected"
            else:
                yield from differences(expected[key], found[key], place)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, (left, right) in enumerate(zip(expected, found, strict=True)):
            yield from differences(left, right, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(expected, found, rel_tol=TOLERANCE):
            yield f"{where}: found {found!r}, expected {expected!r}"
    elif type(expected) is not type(found) or expected != found:
        yield f"{where}: found {found!r}, expected {expected!r}"


def braces(values: list[float] | list[int]) -> str:
    """Format an array as a C initializer, in lines of up to 100 characters."""
    text = "{" + ", ".join(map(repr, values)) + "}"
    return "\n      ".join(textwrap.wrap(text, 90)) if len(values) > 16 else text


def c_entry(book: Codebook) -> str:
    """Format one codebook as a C initializer."""
    return (
        f"    {{{book.head_dim}, {book.bits}, {book.levels.size},\n"
        f"     {braces(book.boundaries.tolist())},\n"
        f"     {braces(book.centroids.tolist())},\n"
        f"     {braces(book.levels.tolist())},\n"
        f"     {book.step!r}, {book.mse!r}}}"
    )


def to_c_header(tables: Tables, trellis_tables: dict[str, Record]) -> str:
    """Format the tables as a self-contained C99 header."""
    entries = [
        c_entry(from_record(int(dim), int(bits), record))
        for dim, books in tables.items()
        for bits, record in books.items()
    ]
    trellis_entries = [
        f"    {{{bits}, {table['unit']!r}, {table['mse']!r},\n     {braces(table['levels'])}}}"
        for bits, table in trellis_tables.items()
    ]
    return HEADER % {
        "count": len(entries),
        "entries": ",\n".join(entries),
        "trellis_count": len(trellis_entries),
        "trellis_entries": ",\n".join(trellis_entries),
    }


Source = tuple[Path, str, Callable[[], Any], Callable[[Any], str]]


def check_data(path: Path, name: str, make: Callable[[], Any]) -> None:
    """Raise unless a file holds what would be written."""
    lines = list(differences(make(), read(path, name)))
    if lines:
        shown = "\n".join(f"  {line}" for line in lines[:10])
        more = f"\n  and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise click.ClickException(
            f"{path} differs from what tools/gen_codebooks.py would write:\n{shown}{more}"
        )
    click.echo(f"{path} is up to date")


def data_option(name: str, default: Path, what: str) -> Callable[[Any], Any]:
    """The option that says where a file of data is."""
    return click.option(
        name,
        type=click.Path(dir_okay=False, path_type=Path),
        default=default,
        metavar="FILE",
        help=f"JSON file of {what} to write, check or convert.  [default: the one in the package]",
    )


@click.command()
@click.option("--check", is_flag=True, help="Compare the data with a fresh solution; write none.")
@click.option(
    "--c-header",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the data as a C99 header instead of solving anew.",
)
@click.option(
    "--only",
    type=click.Choice(["codebooks", "trellis"]),
    help="Write or check the codebooks, or the trellis tables, alone.",
)
@data_option("--data", DATA, "codebooks")
@data_option("--trellis-data", TRELLIS_DATA, "trellis tables")
def main(
    check: bool, c_header: Path | None, only: str | None, data: Path, trellis_data: Path
) -> None:
    """Solve for the Lloyd-Max codebooks and train the trellis tables that kvcodec ships.

    With --check, the exit status is 1 if the data differ from a fresh solution: integers must be
    equal, floats agree to a relative 1e-12.
    """
    sources: dict[str, Source] = {
        "codebooks": (data, "codebooks", solve_all, to_json),
        "trellis": (trellis_data, "tables", train_all, trellis_to_json),
    }
    for kind, (path, name, make, write) in sources.items():
        if only not in (None, kind):
            continue
        if check:
            check_data(path, name, make)
        elif c_header is None:
            path.write_text(write(make()), encoding="utf-8")
            click.echo(f"wrote {path}")
    if c_header is not None:
        text = to_c_header(read(data), read(trellis_data, "tables"))
        c_header.write_text(text, encoding="utf-8")
        click.echo(f"wrote {c_header}")


if __name__ == "__main__":
    main()
