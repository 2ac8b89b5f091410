// The best entries of an index for each row. Called through ctypes by index.py.
//
// A row scores all entries that it sees, in fp32 and in one order, so its choice does not depend on its neighbours or on the pass.
#include "product.h"

#include <algorithm>
#include <functional>
#include <vector>

using namespace hybridserve;

namespace {

constexpr int64_t SCORE_STRIDE = PANEL_W + PAIR;

struct Index {
    elements q;
    int64_t q_row, q_head;
    elements weights; // [T, heads] or without data: ones
    int64_t weights_row;
    const void *keys;
    int64_t block_stride, entry_stride;
    const int32_t *block_tables;
    int64_t table_stride, entries_per_block, tokens_per_entry;
    const int32_t *cu_seqlens, *kv_lens;
    int64_t num_sequences, heads, key_size, num_selected;
    int32_t *out; // [T, num_selected]
    int threads;
};

// What a row sees.
struct Row {
    int64_t sequence, num_entries;
};

std::vector<Row> rows_of(const Index &a) {
    std::vector<Row> rows;
    for (int64_t s = 0; s < a.num_sequences; s++) {
        int64_t count = a.cu_seqlens[s + 1] - a.cu_seqlens[s];
        for (int64_t i = 0; i < count; i++)
            rows.push_back({s, (a.kv_lens[s] - count + i + 1) / a.tokens_per_entry});
    }
    return rows;
}

template <class T> XRows load_queries(const Index &a, int64_t row, float *memory) {
    XRows x{memory, x_stride_for(a.key_size), a.heads};
    for (int64_t h = 0; h < a.heads; h++) {
        int64_t from = row * a.q_row + h * a.q_head;
        if (a.q.is_bf16)
            widen_row<T>(static_cast<const bf16 *>(a.q.data) + from, a.key_size, memory + h * x.stride);
        else
            widen_row<T>(static_cast<const float *>(a.q.data) + from, a.key_size, memory + h * x.stride);
    }
    return x;
}

// to[i] = sum over heads of weight relu(products[head, i]), for some entries. A score that is no number is the least of all.
void reduce(const Index &a, int64_t row, const float *products, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf sum = {};
        for (int64_t h = 0; h < a.heads; h++) {
            vf s = load(products + h * SCORE_STRIDE + i);
            float weight = a.weights.data == nullptr ? 1.0f : a.weights.at(row * a.weights_row + h);
            sum = fma(splat(weight), choose(s < vf{}, vf{}, s), sum);
        }
        store_some(to + i, choose(sum == sum, sum, splat(-INFINITY)), count - i);
    }
}

struct Workspace {
    float *x, *products, *panel, *scores, *sorted;

    Workspace(Scratch &scratch, const Index &a, int64_t num_entries) {
        int64_t queries = a.heads * x_stride_for(a.key_size), padded = round_up(num_entries, LANES);
        x = scratch.floats(queries + a.heads * SCORE_STRIDE + PANEL_SIZE + 2 * padded);
        products = x + queries;
        panel = products + a.heads * SCORE_STRIDE;
        scores = panel + PANEL_SIZE;
        sorted = scores + padded;
    }
};

template <class T> void score(const Index &a, int64_t row, const Row &seen, const Workspace &w) {
    XRows x = load_queries<T>(a, row, w.x);
    const int32_t *blocks = a.block_tables + seen.sequence * a.table_stride;
    auto key = [&](int64_t entry) {
        int64_t at = blocks[entry / a.entries_per_block] * a.block_stride + entry % a.entries_per_block * a.entry_stride;
        return static_cast<const T *>(a.keys) + at;
    };
    for (int64_t first = 0; first < seen.num_entries; first += PANEL_W) {
        WeightRows<T> keys;
        keys.count = smaller(PANEL_W, seen.num_entries - first);
        keys.ahead = 0;
        for (int64_t i = 0; i < keys.count; i++) {
            keys.row[i] = key(first + i);
            if (first + PANEL_W + i < seen.num_entries)
                __builtin_prefetch(key(first + PANEL_W + i), 0, 2);
        }
        multiply(keys, x, a.key_size, w.panel, {w.products, SCORE_STRIDE});
        reduce(a, row, w.products, keys.count, w.scores + first);
    }
}

// Those with the highest scores in ascending order, of equal ones the lower.
void choose_best(const Index &a, const Row &seen, const Workspace &w, int32_t *out) {
    std::copy(w.scores, w.scores + seen.num_entries, w.sorted);
    std::nth_element(w.sorted, w.sorted + a.num_selected - 1, w.sorted + seen.num_entries, std::greater<float>());
    float least = w.sorted[a.num_selected - 1];
    int64_t equal = a.num_selected;
    for (int64_t i = 0; i < seen.num_entries; i++)
        equal -= w.scores[i] > least;
    for (int64_t i = 0; i < seen.num_entries; i++)
        if (w.scores[i] > least || (w.scores[i] == least && equal-- > 0))
            *out++ = int32_t(i);
}

template <class T> void select(const Index &a) {
    std::vector<Row> rows = rows_of(a);
    int64_t count = int64_t(rows.size()), most = 0;
    for (const Row &row : rows)
        most = larger(most, row.num_entries);
#pragma omp parallel num_threads(a.threads) if (a.threads > 1 && most > a.num_selected)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        Workspace w(scratch, a, most);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < count; row++) {
            int32_t *out = a.out + row * a.num_selected;
            if (rows[row].num_entries > a.num_selected) {
                score<T>(a, row, rows[row], w);
                choose_best(a, rows[row], w, out);
            } else
                for (int64_t i = 0; i < a.num_selected; i++)
                    out[i] = i < rows[row].num_entries ? int32_t(i) : -1;
        }
    }
}

} // namespace

// q: [T, heads, K] with strides of rows and heads; weights: [T, heads] with a stride of rows, or null; keys: [B, entries_per_block, K]
// with strides of blocks and entries; all dense in the last dimension. block_tables: [S, *] with row stride.
extern "C" void hs_index_select(const void *q, int32_t q_is_bf16, int64_t q_row, int64_t q_head, const void *weights, int32_t weights_is_bf16,
                                int64_t weights_row, const void *keys, int32_t keys_is_bf16, int64_t block_stride, int64_t entry_stride,
                                const int32_t *block_tables, int64_t table_stride, int64_t entries_per_block, int64_t tokens_per_entry,
                                const int32_t *cu_seqlens, const int32_t *kv_lens, int64_t num_sequences, int64_t heads, int64_t key_size,
                                int64_t num_selected, int32_t *out, int32_t threads) {
    Index a{{q, q_is_bf16 != 0},
            q_row,
            q_head,
            {weights, weights_is_bf16 != 0},
            weights_row,
            keys,
            block_stride,
            entry_stride,
            block_tables,
            table_stride,
            entries_per_block,
            tokens_per_entry,
            cu_seqlens,
            kv_lens,
            num_sequences,
            heads,
            key_size,
            num_selected,
            out,
            threads};
    if (keys_is_bf16)
        select<bf16>(a);
    else
        select<float>(a);
}
