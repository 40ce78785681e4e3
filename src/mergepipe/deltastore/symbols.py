"""Entropy coding of small numbers in contexts: tabled asymmetric numeral systems (tANS), four states on one bit stream.

Format: "Coded numbers" in docs/internals/formats/delta-store.md. A number of 16 bits is a symbol (0, 1, or its two
leading bits and how many follow) and the bits that follow, which are stored as they are. Source: Duda 2013, "Asymmetric
numeral systems", arXiv:1311.2540.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mergepipe.kernels.codec import TILE_ELEMENTS
from mergepipe.kernels.compiled import Bits16, Bits32, Bits64, Bytes, Counts, exported, kernel, template

N_SYMBOLS: Final = 32
N_STATES: Final = 512
MAX_CONTEXTS: Final = 8
TABLE_ENTRIES: Final = (MAX_CONTEXTS + 1) * N_STATES
"""Decoding entries of all contexts, and of elements without a number in the last row, `SKIPPED`."""
SKIPPED: Final = MAX_CONTEXTS * N_STATES
"""The row of elements that have no number: decoding gives 0, and nothing is read. Rows begin at multiples of
`N_STATES`."""
TILE: Final = TILE_ELEMENTS
"""Elements that are decoded at a time."""
WORDS_ROOM: Final = TILE * 23 // 16 + 8
"""Words (16 bits) that a tile may read past its first, whatever the content: 9 bits of state and 14 of a number."""
STATES_BYTES: Final = 9
"""Bytes of the four states, and of the number of bits that are skipped."""

_STATE_BITS = 9
_SPREAD_STEP = (N_STATES >> 1) + (N_STATES >> 3) + 3
_MASK_BYTES = 4
_OWN_STATES: Final = N_STATES
"""Where the states of the first context begin in the table of encoding, so that no place in it is negative."""
_SKIPPED_SLOT: Final = MAX_CONTEXTS * N_SYMBOLS
"""The slot of skipped elements. A slot is a symbol of a context."""
_SLOTS: Final = _SKIPPED_SLOT + 1


@kernel
def scale_counts(counts: Counts, frequencies: Bits16) -> None:
    """Scale the counts of one context's symbols to frequencies that add up to `N_STATES`, or are all 0.

    A symbol that occurs has a frequency of at least 1.
    """
    total, excess = np.int64(0), np.int64(-N_STATES)
    for s in range(N_SYMBOLS):
        total += counts[s]
    for s in range(N_SYMBOLS):
        scaled = (counts[s] * N_STATES + total // 2) // max(total, 1)
        frequencies[s] = max(scaled, 1) if counts[s] > 0 else 0
        excess += np.int64(frequencies[s])
    while total > 0 and excess != 0:
        largest = frequencies.argmax()
        change = min(excess, np.int64(frequencies[largest]) // 4 + 1)
        frequencies[largest] = np.int64(frequencies[largest]) - change
        excess -= change


@kernel
def _spread_symbols(frequencies: Bits16, symbols: Bytes) -> None:
    """Give each state its symbol: those of one symbol lie apart."""
    state = 0
    for s in range(N_SYMBOLS):
        for _ in range(np.int64(frequencies[s])):
            symbols[state] = s
            state = (state + _SPREAD_STEP) & (N_STATES - 1)


@template
def _log2(number: np.int64) -> np.int64:
    """The position of the highest one of a number from 1 to 2**24."""
    return np.int64(np.float32(number).view(np.int32) >> np.int32(23)) - np.int64(127)


@kernel
def _fill_decoding(frequencies: Bits16, row: Bits64) -> None:
    """Fill the decoding entries of one context; without frequencies, those of `SKIPPED`.

    From the lowest byte: the bits to read, of these the bits of the number (one byte each), the lowest number of the
    symbol (two), the lowest state that follows.
    """
    symbols, following = np.empty(N_STATES, np.uint8), np.empty(N_SYMBOLS, np.int64)
    _spread_symbols(frequencies, symbols)
    is_used = False
    for s in range(N_SYMBOLS):
        following[s] = frequencies[s]
        is_used = is_used or frequencies[s] > 0
    for state in range(N_STATES):
        if not is_used:
            row[state] = np.uint64(state) << np.uint64(32)
            continue
        symbol = np.int64(symbols[state])
        successor = following[symbol]
        following[symbol] += 1
        n_bits, number_bits = _STATE_BITS - _log2(successor), np.int64(max(symbol >> 1, np.int64(1))) - 1
        lowest = symbol if symbol < 4 else (2 | (symbol & 1)) << number_bits
        upper = (np.uint64((successor << n_bits) - N_STATES) << np.uint64(16)) | np.uint64(lowest)
        row[state] = (upper << np.uint64(16)) | np.uint64((number_bits << 8) | (n_bits + number_bits))


@kernel
def _fill_encoding(frequencies: Bits16, context: int, entries: Bits64, states: Bits16) -> None:
    """Fill the tables that encode the numbers of one context: an entry a symbol, and the states by symbol.

    The lower half of an entry is added to a state: then its bits from the 16th on are how many bits to write, those of
    the number included. Above it: what is added to the shifted state, so that it is the place of the next one in
    `states` (16), and how many bits of the number follow its symbol (16).
    """
    symbols, firsts = np.empty(N_STATES, np.uint8), np.zeros(N_SYMBOLS, np.int64)
    _spread_symbols(frequencies, symbols)
    begin = _OWN_STATES + context * N_STATES
    first = begin
    for s in range(N_SYMBOLS):
        frequency, firsts[s] = int(frequencies[s]), first
        n_bits = _STATE_BITS - _log2(np.int64(frequency - 1)) if frequency > 1 else _STATE_BITS
        number_bits = max(s >> 1, 1) - 1
        added = ((n_bits + number_bits) << 16) - (frequency << n_bits)
        entries[context * N_SYMBOLS + s] = (number_bits << 48) | (np.int64(first - frequency) << 32) | added
        first += frequency
    for state in range(first - begin):  # none where no symbol occurs
        symbol = symbols[state]
        states[firsts[symbol]] = N_STATES + state
        firsts[symbol] += 1


# --- write and read the numbers of one piece: frequencies by context, states, bits ---


@kernel
def encode_numbers(
    numbers: Bits16, rows: Bits16, n_contexts: int, symbols: Bytes, words: Bits32, content: Bytes
) -> int:
    """Encode the numbers of a block into `content`, which has room for all; return the bytes written.

    `rows` are `N_STATES` times the context, or `SKIPPED`, where the number is 0; `symbols` and `words` (as many as
    elements, and one) are work arrays. The last element is encoded first: a state is what is left to decode.
    """
    _fill_symbols(numbers, symbols)
    counts = np.zeros(_SLOTS, np.int64)
    _count_slots(symbols, rows, counts)
    entries, frequencies = np.zeros(_SLOTS, np.uint64), np.zeros(N_SYMBOLS, np.uint16)
    states = np.zeros(_OWN_STATES + TABLE_ENTRIES, np.uint16)
    at = 0
    for context in range(n_contexts):
        scale_counts(counts[context * N_SYMBOLS : (context + 1) * N_SYMBOLS], frequencies)
        _fill_encoding(frequencies, context, entries, states)
        at = _write_frequencies(frequencies, content, at)
    entries[_SKIPPED_SLOT] = np.uint64(SKIPPED + _OWN_STATES - N_STATES) << np.uint64(32)
    for state in range(N_STATES):  # skipped elements leave the state as it is
        states[_OWN_STATES + SKIPPED + state] = N_STATES + state
    last_states = np.full(4, N_STATES, np.uint64)
    stored = words.view(np.uint8)
    n_bits = _encode_backwards(numbers, symbols, rows, entries, states, last_states, words.view(np.uint16))
    for lane in range(4):
        last = np.int64(last_states[lane]) - N_STATES
        content[at + 2 * lane], content[at + 2 * lane + 1] = last & 0xFF, last >> 8
    skipped_bits = -n_bits % 8
    content[at + 8] = skipped_bits
    at += STATES_BYTES
    n_bytes = (n_bits + skipped_bits) // 8
    source, target = stored[len(stored) - n_bytes :], content[at:]
    for i in range(n_bytes):  # an assignment of arrays takes ten times as long
        target[i] = source[i]
    return at + n_bytes


@kernel
def _fill_symbols(numbers: Bits16, symbols: Bytes) -> None:
    """Write the symbol of each number: the exponent and the first bit of the mantissa of its float32."""
    for i in range(len(numbers)):
        number = np.int32(numbers[i])
        leading = np.int32(np.float32(number).view(np.int32) >> np.int32(22)) - np.int32(254)
        symbols[i] = np.uint8(number if number < np.int32(2) else leading)


@kernel
def _write_frequencies(frequencies: Bits16, content: Bytes, at: int) -> int:
    """Write a mask of the symbols that occur, and their frequencies less 1; return where they end."""
    mask, end = np.uint64(0), at + _MASK_BYTES
    for s in range(N_SYMBOLS):
        if frequencies[s] > 0:
            mask |= np.uint64(1) << np.uint64(s)
            stored = np.int64(frequencies[s]) - 1
            content[end], content[end + 1] = stored & 0xFF, stored >> 8
            end += 2
    for byte in range(_MASK_BYTES):
        content[at + byte] = (mask >> np.uint64(8 * byte)) & np.uint64(0xFF)
    return end


@template
def _fill_slots(rows: Bits16, symbols: Bytes, slots: Bits16) -> None:
    """Write the slots of a tile; that of skipped elements follows up to the next multiple of 4."""
    for i in range(len(rows)):
        slots[i] = np.uint16(np.uint16(rows[i] >> np.uint16(_STATE_BITS - 5)) + np.uint16(symbols[i]))
    for i in range(len(rows), (len(rows) + 3) // 4 * 4):
        slots[i] = _SKIPPED_SLOT


@template
def _fill_elements(numbers: Bits16, symbols: Bytes, rows: Bits16, elements: Bits32) -> None:
    """Write a tile as it is encoded: the slots, and above each the bits of the number that follow its symbol."""
    for i in range(len(numbers)):
        number, slot = np.int32(numbers[i]), np.uint16(np.uint16(rows[i] >> np.uint16(_STATE_BITS - 5)) + symbols[i])
        leading = np.int32(np.float32(number).view(np.int32) & np.int32(-1 << 22)).view(np.float32)
        following = np.uint32(np.int32(number - np.int32(leading)))
        elements[i] = np.uint32(following << np.uint32(16)) | np.uint32(slot)
    for i in range(len(numbers), (len(numbers) + 3) // 4 * 4):
        elements[i] = np.uint32(_SKIPPED_SLOT)


@kernel
def _count_slots(symbols: Bytes, rows: Bits16, counts: Counts) -> None:
    """Count the symbols of each context.

    There are four counters of each, as equal neighbours would otherwise wait for each other.
    """
    slots, own, one = np.empty(TILE, np.uint16), np.zeros((4, _SLOTS), np.uint32), np.uint32(1)
    first, second, third, fourth = own[0], own[1], own[2], own[3]
    for start in range(0, len(rows), TILE):
        stop = min(start + TILE, len(rows))
        _fill_slots(rows[start:stop], symbols[start:stop], slots)
        for k in range(0, stop - start, 4):
            i = np.uint64(k)
            first[np.uint64(slots[i])] += one
            second[np.uint64(slots[i + np.uint64(1)])] += one
            third[np.uint64(slots[i + np.uint64(2)])] += one
            fourth[np.uint64(slots[i + np.uint64(3)])] += one
    for slot in range(_SLOTS):
        counts[slot] = np.int64(first[slot]) + np.int64(second[slot]) + np.int64(third[slot]) + np.int64(fourth[slot])


@template
def _low_bits(window: np.uint64, count: np.uint64) -> np.uint64:
    return np.uint64(window & ((np.uint64(1) << count) - np.uint64(1)))


@kernel
def _encode_backwards(
    numbers: Bits16, symbols: Bytes, rows: Bits16, entries: Bits64, states: Bits16, last_states: Bits64, words: Bits16
) -> int:
    """Encode from the last element to the first, filling `words` from their end; return how many bits there are.

    Two elements have 46 bits at most, so that they and the 15 before that fill no word fit into 64.
    """
    elements = np.empty(TILE, np.uint32)
    parts, entry_halves, entry_quarters = elements.view(np.uint16), entries.view(np.uint32), entries.view(np.uint16)
    first, second, third, fourth = last_states[0], last_states[1], last_states[2], last_states[3]
    bits, count, word = np.uint64(0), np.uint64(0), np.uint64(len(words))
    for start in range((len(numbers) - 1) // TILE * TILE, -1, -TILE):
        stop = min(start + TILE, len(numbers))
        _fill_elements(numbers[start:stop], symbols[start:stop], rows[start:stop], elements)
        for k in range((stop - start + 3) // 4 * 4 - 4, -1, -4):
            i = np.uint64(k)
            fourth, third, bits, count = _append_pair(
                parts, i + np.uint64(2), fourth, third, bits, count, entry_halves, entry_quarters, states
            )
            word, count = _write_words(bits, count, word, words)
            second, first, bits, count = _append_pair(
                parts, i, second, first, bits, count, entry_halves, entry_quarters, states
            )
            word, count = _write_words(bits, count, word, words)
    words[word - np.uint64(1)] = np.uint16(bits << (np.uint64(16) - count))
    last_states[0], last_states[1], last_states[2], last_states[3] = first, second, third, fourth
    return 16 * (len(words) - int(word)) + int(count)


@template
def _append_pair(
    parts: Bits16, i: np.uint64, upper_state: np.uint64, lower_state: np.uint64,
    bits: np.uint64, count: np.uint64, entry_halves: Bits32, entry_quarters: Bits16, states: Bits16,
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:  # fmt: skip
    """Append the bits of the elements `i + 1` and `i`; return their states, all bits and how many are new.

    Parts of entries and elements are loaded one by one: processors shift less often in a cycle than they load.
    """
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    k = two * i
    slot, following = np.uint64(parts[k + two]), np.uint64(parts[k + three])
    coded = (upper_state << np.uint64(entry_quarters[np.uint64(4) * slot + three])) | following
    upper_bits = np.uint64(np.uint32(upper_state + entry_halves[two * slot]) >> np.uint32(16))
    appended = _low_bits(coded, upper_bits)
    upper_state = np.uint64(states[(coded >> upper_bits) + np.uint64(entry_quarters[np.uint64(4) * slot + two])])
    slot, following = np.uint64(parts[k]), np.uint64(parts[k + one])
    coded = (lower_state << np.uint64(entry_quarters[np.uint64(4) * slot + three])) | following
    lower_bits = np.uint64(np.uint32(lower_state + entry_halves[two * slot]) >> np.uint32(16))
    appended = (appended << lower_bits) | _low_bits(coded, lower_bits)
    lower_state = np.uint64(states[(coded >> lower_bits) + np.uint64(entry_quarters[np.uint64(4) * slot + two])])
    n_appended = upper_bits + lower_bits
    return upper_state, lower_state, np.uint64((bits << n_appended) | appended), np.uint64(count + n_appended)


@template
def _write_words(bits: np.uint64, count: np.uint64, word: np.uint64, words: Bits16) -> tuple[np.uint64, np.uint64]:
    """Write the last `count` bits below `word`; return where the last full word is, and how many bits are left.

    Bits that fill no word are written as well: the next call overwrites them.
    """
    top = (bits << np.uint64(1)) << (np.uint64(63) - count)
    words[word - np.uint64(4)] = np.uint16(top)
    words[word - np.uint64(3)] = np.uint16(top >> np.uint64(16))
    words[word - np.uint64(2)] = np.uint16(top >> np.uint64(32))
    words[word - np.uint64(1)] = np.uint16(top >> np.uint64(48))
    return np.uint64(word - (count >> np.uint64(4))), np.uint64(count & np.uint64(15))


@exported("table", "states", "words")
def read_numbers(content: Bytes, n_contexts: int, table: Bits64, states: Bits64, words: Bits16) -> int:
    """Read what `encode_numbers` wrote: fill the decoding table, the states and the words.

    `words` have room for `content` and `WORDS_ROOM`. Returns 8 times their bytes, plus the bits to skip; or -1 where
    the content is not valid: what is filled never makes `decode_numbers` read or write outside.
    """
    at, frequencies = 0, np.zeros(N_SYMBOLS, np.uint16)
    _fill_decoding(frequencies, table[SKIPPED:])
    for context in range(n_contexts):
        if at + _MASK_BYTES > len(content):
            return -1
        mask, total = np.int64(0), np.int64(0)
        for byte in range(_MASK_BYTES):
            mask |= np.int64(content[at + byte]) << (8 * byte)
        at += _MASK_BYTES
        frequencies[:] = 0
        for s in range(N_SYMBOLS):
            if (mask >> s) & 1:
                if at + 2 > len(content):
                    return -1
                frequency = (np.int64(content[at]) | (np.int64(content[at + 1]) << 8)) + 1
                at, total = at + 2, total + frequency
                frequencies[s] = np.uint16(min(frequency, np.int64(N_STATES)))
        if mask and total != N_STATES:
            return -1
        _fill_decoding(frequencies, table[context * N_STATES : (context + 1) * N_STATES])
    if at + STATES_BYTES > len(content):
        return -1
    for lane in range(4):
        states[lane] = np.uint64(content[at + 2 * lane]) | (np.uint64(content[at + 2 * lane + 1]) << np.uint64(8))
        if states[lane] >= np.uint64(N_STATES):
            return -1
    skipped_bits = int(content[at + 8])
    at += STATES_BYTES
    n_bytes = len(content) - at
    source, stored = content[at:], words.view(np.uint8)
    for i in range(n_bytes):
        stored[i] = source[i]
    stored[n_bytes : n_bytes + 2 * WORDS_ROOM] = 0
    return 8 * n_bytes + skipped_bits if skipped_bits < 8 else -1


@template
def _window(words: Bits16, position: np.uint64) -> np.uint64:
    """At least 49 bits from a position on."""
    k, one = position >> np.uint64(4), np.uint64(1)
    low = np.uint64(words[k]) | (np.uint64(words[k + one]) << np.uint64(16))
    k += np.uint64(2)
    high = np.uint64(words[k]) | (np.uint64(words[k + one]) << np.uint64(16))
    return np.uint64((low | (high << np.uint64(32))) >> (position & np.uint64(15)))


@template
def _number_of(entry: np.uint64, window: np.uint64) -> np.uint16:
    """The number of a decoding entry, whose following bits are the lowest of the window."""
    return np.uint16((entry >> np.uint64(16)) + _low_bits(window, (entry >> np.uint64(8)) & np.uint64(0xFF)))


@template
def _state_after(entry: np.uint64, window: np.uint64) -> np.uint64:
    """The state after a decoding entry: its bits are above those of the number."""
    number_bits = (entry >> np.uint64(8)) & np.uint64(0xFF)
    return np.uint64((entry >> np.uint64(32)) + (_low_bits(window, entry & np.uint64(0xFF)) >> number_bits))


@kernel
def decode_numbers(
    words: Bits16, position: np.uint64, states: Bits64, table: Bits64, rows: Bits16, n: int, numbers: Bits16
) -> np.uint64:
    """Decode a tile of `n` (a multiple of 4) elements from a bit position on; return that of the next tile.

    23 bits an element at most: two share a window. Four states do not wait for each other.
    """
    first, second, third, fourth = states[0], states[1], states[2], states[3]
    bits, one = np.uint64(0xFF), np.uint64(1)
    for start in range(0, n, 4):
        i = np.uint64(start)
        window = _window(words, position)
        entry = table[np.uint64(rows[i]) + first]
        first, numbers[i] = _state_after(entry, window), _number_of(entry, window)
        position += entry & bits
        window >>= entry & bits
        entry = table[np.uint64(rows[i + one]) + second]
        second, numbers[i + one] = _state_after(entry, window), _number_of(entry, window)
        position += entry & bits
        i += np.uint64(2)
        window = _window(words, position)
        entry = table[np.uint64(rows[i]) + third]
        third, numbers[i] = _state_after(entry, window), _number_of(entry, window)
        position += entry & bits
        window >>= entry & bits
        entry = table[np.uint64(rows[i + one]) + fourth]
        fourth, numbers[i + one] = _state_after(entry, window), _number_of(entry, window)
        position += entry & bits
    states[0], states[1], states[2], states[3] = first, second, third, fourth
    return np.uint64(position)
