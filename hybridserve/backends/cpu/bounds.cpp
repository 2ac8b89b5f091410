// Whether the indices of a pass lie inside the memory that they are for. Called through ctypes by bounds.py, before kernels that would
// read or write wherever an index points.
#include <cstdint>

namespace {

bool is_outside(int64_t value, int64_t low, int64_t high) { return value < low || value >= high; }

} // namespace

// The first position whose value is outside low to high - 1, or -1.
extern "C" int64_t hs_first_outside(const int64_t *values, int64_t count, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count; i++)
        if (is_outside(values[i], low, high))
            return i;
    return -1;
}

// The first of the entries of block_tables that a pass reads which names no block, as row * 2^32 + column, or -1. A row of the
// batch sees `window` tokens, itself among them; the table has `width` columns.
extern "C" int64_t hs_first_block_outside(const int32_t *block_tables, int64_t table_stride, int64_t width, int64_t block_size,
                                          int64_t num_blocks, const int32_t *cu_seqlens, const int32_t *kv_lens, int64_t num_sequences,
                                          int64_t window) {
    for (int64_t s = 0; s < num_sequences; s++) {
        int64_t count = cu_seqlens[s + 1] - cu_seqlens[s], first = kv_lens[s] - count + 1 - window;
        for (int64_t column = first > 0 ? first / block_size : 0; column * block_size < kv_lens[s]; column++)
            if (column >= width || is_outside(block_tables[s * table_stride + column], 0, num_blocks))
                return (s << 32) + column;
    }
    return -1;
}
