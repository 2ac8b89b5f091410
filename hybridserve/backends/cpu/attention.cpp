// Causal attention over paged keys and values, and the write of their entries. Called through ctypes by attention.py.
//
// A query vector is one head of one row. Keys are cut into segments at fixed positions; each segment has its own softmax, and segments are
// merged from left to right. Vectors that share a key head are taken together in tiles. So a vector's result has the same bits whatever
// tile, pass, batch or number of threads it is computed in. Entries that no row of a tile sees are never read. A row for which tokens
// are named has tiles of its own, which take those in place of the first so many.
#include "product.h"

#include <vector>

using namespace hybridserve;

namespace {

constexpr int64_t TILE = 32;
constexpr int64_t SEGMENT = 512;
constexpr int64_t SCORE_STRIDE = SEGMENT + PANEL_W + PAIR;
// Vectors of scores whose exponentials are computed abreast.
constexpr int ABREAST = 4;
// Values are added for so many tokens at a time, while they are in the inner cache.
constexpr int64_t VALUE_TOKENS = 32;

struct CacheView {
    const void *data;
    int64_t block_stride, token_stride, head_stride;
};

struct Attention {
    elements q;
    int64_t q_row, q_head;
    CacheView k, v;
    const int32_t *block_tables;
    int64_t table_stride, block_size;
    const int32_t *cu_seqlens, *kv_lens;
    int64_t num_sequences, heads, key_heads, key_size, value_size;
    float scale;
    int64_t window; // tokens that a row sees
    float softcap;  // 0 for none
    elements sinks; // [heads] or without data
    void *out;
    bool out_is_bf16;
    int threads;

    int64_t group() const { return heads / key_heads; }
    int64_t x_stride() const { return x_stride_for(key_size); }
    int64_t value_stride() const { return round_up(value_size, PAIR); }
};

// Vectors of one sequence and key head: vector i is head i % group of row i / group.
struct Tile {
    int64_t sequence, key_head, first, count;
    int64_t begin, end; // tokens that any of its rows sees
    const int32_t *named; // or null: then token i is the i-th of the sequence

    int64_t segments() const { return (end - 1) / SEGMENT - begin / SEGMENT + 1; }
};

// The softmax of some tokens for each vector of a tile: greatest score, sum of exponentials, sum of weighted values.
struct Partial {
    float *most, *total, *values;

    static int64_t size(const Attention &a, int64_t count) { return count * (2 + a.value_stride()); }
    static Partial at(float *memory, int64_t count) { return {memory, memory + count, memory + 2 * count}; }
};

int64_t position_of(const Attention &a, int64_t sequence, int64_t vector) {
    int64_t rows = a.cu_seqlens[sequence + 1] - a.cu_seqlens[sequence];
    return a.kv_lens[sequence] - rows + vector / a.group();
}

std::vector<Tile> tiles_of(const Attention &a) {
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < a.num_sequences; s++) {
        int64_t vectors = (a.cu_seqlens[s + 1] - a.cu_seqlens[s]) * a.group();
        for (int64_t h = 0; h < a.key_heads; h++)
            for (int64_t first = 0; first < vectors; first += TILE) {
                int64_t count = smaller(TILE, vectors - first);
                int64_t begin = larger(0, position_of(a, s, first) - a.window + 1);
                tiles.push_back({s, h, first, count, begin, position_of(a, s, first + count - 1) + 1, nullptr});
            }
    }
    return tiles;
}

// Tiles of single rows. named: [T, count], of which the first num_named[row] are tokens.
std::vector<Tile> tiles_of_rows(const Attention &a, const int32_t *named, const std::vector<int64_t> &num_named, int64_t count) {
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < a.num_sequences; s++)
        for (int64_t row = a.cu_seqlens[s]; row < a.cu_seqlens[s + 1]; row++)
            for (int64_t h = 0; h < a.key_heads; h++)
                for (int64_t at = 0; at < a.group(); at += TILE) {
                    int64_t first = (row - a.cu_seqlens[s]) * a.group() + at;
                    tiles.push_back({s, h, first, smaller(TILE, a.group() - at), 0, num_named[row], named + row * count});
                }
    return tiles;
}

template <class T> const T *entry(const Attention &a, const CacheView &cache, const Tile &tile, int64_t token) {
    if (tile.named != nullptr)
        token = tile.named[token];
    int64_t block = a.block_tables[tile.sequence * a.table_stride + token / a.block_size];
    int64_t offset = block * cache.block_stride + token % a.block_size * cache.token_stride + tile.key_head * cache.head_stride;
    return static_cast<const T *>(cache.data) + offset;
}

int64_t row_of(const Attention &a, const Tile &tile, int64_t vector) {
    return a.cu_seqlens[tile.sequence] + (tile.first + vector) / a.group();
}
int64_t head_of(const Attention &a, const Tile &tile, int64_t vector) {
    return tile.key_head * a.group() + (tile.first + vector) % a.group();
}

template <class T> XRows load_queries(const Attention &a, const Tile &tile, float *memory) {
    XRows x{memory, a.x_stride(), tile.count};
    for (int64_t i = 0; i < tile.count; i++) {
        float *to = memory + i * x.stride;
        int64_t from = row_of(a, tile, i) * a.q_row + head_of(a, tile, i) * a.q_head;
        if (a.q.is_bf16)
            widen_row<T>(static_cast<const bf16 *>(a.q.data) + from, a.key_size, to);
        else
            widen_row<T>(static_cast<const float *>(a.q.data) + from, a.key_size, to);
        for (int64_t p = 0; p < x.stride - PAIR; p += LANES)
            store(to + p, load(to + p) * splat(a.scale));
    }
    return x;
}

template <class T> static inline void prefetch_entry(const T *entry, int64_t size) {
    for (int64_t at = 0; at < size; at += int64_t(64 / sizeof(T)))
        __builtin_prefetch(entry + at, 0, 2);
}

// scores[i, token - origin] of tokens begin to end.
template <class T>
void score(const Attention &a, const Tile &tile, const XRows &x, int64_t origin, int64_t begin, int64_t end, float *scores, float *panel) {
    for (int64_t token = begin; token < end; token += PANEL_W) {
        WeightRows<T> keys;
        keys.count = smaller(PANEL_W, end - token);
        keys.ahead = 0;
        for (int64_t i = 0; i < keys.count; i++)
            keys.row[i] = entry<T>(a, a.k, tile, token + i);
        // Entries lie apart and values are read by column: without asking, each line would be waited for.
        for (int64_t i = 0; i < keys.count; i++) {
            prefetch_entry(entry<T>(a, a.v, tile, token + i), a.value_size);
            if (token + PANEL_W + i < end)
                prefetch_entry(entry<T>(a, a.k, tile, token + PANEL_W + i), a.key_size);
        }
        multiply(keys, x, a.key_size, panel, {scores + token - origin, SCORE_STRIDE});
    }
}

vf capped(vf s, float softcap) {
    vf e = exp_lanes(s * splat(2.0f / softcap));
    return splat(softcap) * (splat(1.0f) - splat(2.0f) / (e + splat(1.0f)));
}

// Scores of one vector to exponentials, in place; it sees those from `first` to `last`, relative to the segment. The others become 0.
void exponentials(const Attention &a, float *scores, int64_t first, int64_t last, int64_t computed_end, float *most, float *total) {
    int64_t padded = round_up(computed_end, ABREAST * LANES);
    for (int64_t i = 0; i < first; i++)
        scores[i] = -INFINITY;
    for (int64_t i = larger(0, last); i < padded; i++)
        scores[i] = -INFINITY;
    vf top = splat(-INFINITY);
    for (int64_t i = 0; i < padded; i += LANES) {
        vf s = load(scores + i);
        if (a.softcap > 0) {
            s = choose(s == splat(-INFINITY), s, capped(s, a.softcap));
            store(scores + i, s);
        }
        top = choose(s > top, s, top);
    }
    float highest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        highest = top[lane] > highest ? top[lane] : highest;
    // A vector that sees nothing here has weights 0, not exp(-inf + inf).
    vf shift = splat(highest == -INFINITY ? 0.0f : highest), sum = {};
    for (int64_t i = 0; i < padded; i += ABREAST * LANES) {
        vf e[ABREAST];
        for (int n = 0; n < ABREAST; n++)
            e[n] = load(scores + i + n * LANES) - shift;
        exp_lanes<ABREAST>(e);
        for (int n = 0; n < ABREAST; n++) {
            store(scores + i + n * LANES, e[n]);
            sum += e[n];
        }
    }
    *total = sum_lanes(sum);
    // Not a number if a score was none: it must not look like a vector that saw nothing.
    *most = *total == *total ? highest : 0.0f;
}

// values[i] += weights[i, token - begin] v[token] for NQ vectors and one pair of value vectors.
template <int NQ, class T>
static inline void add_values(const T *const *rows, int64_t count, int64_t at, int64_t size, const float *weights, float *values, int64_t stride) {
    vf first[NQ], second[NQ];
    for (int q = 0; q < NQ; q++) {
        first[q] = load(values + q * stride);
        second[q] = load(values + q * stride + LANES);
    }
    for (int64_t t = 0; t < count; t++) {
        pair v = size >= PAIR ? load_pair(rows[t] + at) : load_pair_first(rows[t] + at, size);
        for (int q = 0; q < NQ; q++) {
            vf weight = splat(weights[q * SCORE_STRIDE + t]);
            first[q] = fma(weight, v.first, first[q]);
            second[q] = fma(weight, v.second, second[q]);
        }
    }
    for (int q = 0; q < NQ; q++) {
        store(values + q * stride, first[q]);
        store(values + q * stride + LANES, second[q]);
    }
}

template <class T>
void weigh_values(const Attention &a, const Tile &tile, int64_t origin, int64_t begin, int64_t end, const float *weights, float *values) {
    int64_t stride = a.value_stride();
    memset(values, 0, tile.count * stride * 4);
    for (int64_t token = begin; token < end; token += VALUE_TOKENS) {
        int64_t count = smaller(VALUE_TOKENS, end - token);
        const T *rows[VALUE_TOKENS];
        for (int64_t t = 0; t < count; t++)
            rows[t] = entry<T>(a, a.v, tile, token + t);
        for (int64_t q = 0; q < tile.count; q += 4)
            for (int64_t at = 0; at < a.value_size; at += PAIR) {
                const float *w = weights + q * SCORE_STRIDE + token - origin;
                float *to = values + q * stride + at;
                int64_t size = a.value_size - at;
                switch (tile.count - q) {
                case 1: add_values<1>(rows, count, at, size, w, to, stride); break;
                case 2: add_values<2>(rows, count, at, size, w, to, stride); break;
                case 3: add_values<3>(rows, count, at, size, w, to, stride); break;
                default: add_values<4>(rows, count, at, size, w, to, stride);
                }
            }
    }
}

struct Workspace {
    float *x, *scores, *panel, *merged, *part;

    Workspace(Scratch &scratch, const Attention &a) {
        int64_t partial = Partial::size(a, TILE);
        x = scratch.floats(TILE * (a.x_stride() + SCORE_STRIDE) + PANEL_SIZE + 2 * partial);
        scores = x + TILE * a.x_stride();
        panel = scores + TILE * SCORE_STRIDE;
        merged = panel + PANEL_SIZE;
        part = merged + partial;
    }
};

template <class T> void attend_segment(const Attention &a, const Tile &tile, const XRows &x, int64_t segment, const Workspace &w, Partial part) {
    int64_t origin = segment * SEGMENT, begin = larger(origin, tile.begin), end = smaller(origin + SEGMENT, tile.end);
    score<T>(a, tile, x, origin, begin, end, w.scores, w.panel);
    for (int64_t i = 0; i < tile.count; i++) {
        int64_t position = tile.named == nullptr ? position_of(a, tile.sequence, tile.first + i) : end - 1;
        int64_t first = smaller(larger(begin, position - a.window + 1), end) - origin, last = smaller(end, position + 1) - origin;
        exponentials(a, w.scores + i * SCORE_STRIDE, first, last, end - origin, part.most + i, part.total + i);
    }
    weigh_values<T>(a, tile, origin, begin, end, w.scores, part.values);
}

// `into` becomes the softmax over both. A part that saw nothing changes no bit.
void merge(const Attention &a, int64_t count, Partial into, Partial part) {
    int64_t stride = a.value_stride();
    for (int64_t i = 0; i < count; i++) {
        if (part.most[i] == -INFINITY)
            continue;
        float most = into.most[i] >= part.most[i] ? into.most[i] : part.most[i];
        float keep = expf(into.most[i] - most), add = expf(part.most[i] - most);
        into.most[i] = most;
        into.total[i] = fmaf(part.total[i], add, into.total[i] * keep);
        float *to = into.values + i * stride;
        const float *from = part.values + i * stride;
        for (int64_t p = 0; p < stride; p += LANES)
            store(to + p, fma(load(from + p), splat(add), load(to + p) * splat(keep)));
    }
}

template <class T> void finish(const Attention &a, const Tile &tile, Partial merged) {
    for (int64_t i = 0; i < tile.count; i++) {
        float most = merged.most[i], total = merged.total[i], factor = 1.0f;
        if (a.sinks.data != nullptr) {
            float sink = a.sinks.at(head_of(a, tile, i)), top = most >= sink ? most : sink;
            factor = expf(most - top);
            total = fmaf(total, factor, expf(sink - top));
        }
        factor /= total;
        const float *values = merged.values + i * a.value_stride();
        int64_t to = (row_of(a, tile, i) * a.heads + head_of(a, tile, i)) * a.value_size;
        for (int64_t at = 0; at < a.value_size; at += PAIR) {
            float entries[PAIR];
            for (int64_t p = 0; p < PAIR; p++)
                entries[p] = values[at + (sizeof(T) == 2 ? p / 2 + p % 2 * LANES : p)];
            for (int64_t half = 0; half < PAIR && at + half < a.value_size; half += LANES) {
                vf y = load(entries + half) * splat(factor);
                store_elements(a.out, a.out_is_bf16, to + at + half, y, a.value_size - at - half);
            }
        }
    }
}

template <class T> void attend_tile(const Attention &a, const Tile &tile, const Workspace &w) {
    Partial merged = Partial::at(w.merged, tile.count), part = Partial::at(w.part, tile.count);
    XRows x = load_queries<T>(a, tile, w.x);
    int64_t first = tile.begin / SEGMENT;
    for (int64_t segment = 0; segment < tile.segments(); segment++) {
        attend_segment<T>(a, tile, x, first + segment, w, segment == 0 ? merged : part);
        if (segment > 0)
            merge(a, tile.count, merged, part);
    }
    finish<T>(a, tile, merged);
}

// With fewer tiles than threads can share: segments are computed apart and merged afterwards.
template <class T> void attend_split(const Attention &a, const std::vector<Tile> &tiles) {
    static thread_local Scratch shared;
    struct Piece {
        const Tile *tile;
        int64_t segment, offset;
    };
    std::vector<Piece> pieces;
    int64_t offset = 0;
    for (const Tile &tile : tiles)
        for (int64_t segment = 0; segment < tile.segments(); segment++) {
            pieces.push_back({&tile, tile.begin / SEGMENT + segment, offset});
            offset += Partial::size(a, tile.count);
        }
    int64_t num_pieces = int64_t(pieces.size());
    float *memory = shared.floats(offset);
#pragma omp parallel num_threads(a.threads)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        Workspace w(scratch, a);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_pieces; i++) {
            const Tile &tile = *pieces[i].tile;
            XRows x = load_queries<T>(a, tile, w.x);
            attend_segment<T>(a, tile, x, pieces[i].segment, w, Partial::at(memory + pieces[i].offset, tile.count));
        }
    }
    FlushDenormals flush;
    auto piece = pieces.begin();
    for (const Tile &tile : tiles) {
        Partial merged = Partial::at(memory + piece++->offset, tile.count);
        for (int64_t segment = 1; segment < tile.segments(); segment++)
            merge(a, tile.count, merged, Partial::at(memory + piece++->offset, tile.count));
        finish<T>(a, tile, merged);
    }
}

template <class T> void attend(const Attention &a, const std::vector<Tile> &tiles) {
    int64_t count = int64_t(tiles.size()), work = 0;
    for (const Tile &tile : tiles)
        work += (tile.end - tile.begin) * tile.count * (a.key_size + a.value_size);
    bool shared = a.threads > 1 && work > 131072;
    if (shared && count < 4 * a.threads)
        return attend_split<T>(a, tiles);
#pragma omp parallel num_threads(a.threads) if (shared)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        Workspace w(scratch, a);
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < count; t++)
            attend_tile<T>(a, tiles[t], w);
    }
}

template <class From, class To> void copy_entry(const From *from, To *to, int64_t size) {
    if constexpr (sizeof(From) == sizeof(To))
        memcpy(to, from, size * sizeof(To));
    else
        for (int64_t i = 0; i < size; i += LANES)
            store_some(to + i, load_some(from + i, size - i), size - i);
}

} // namespace

// q: [T, heads, K] with strides of rows and heads; caches: [B, block_size, key_heads, K or V] with strides of blocks, tokens and heads,
// both of one type; all dense in the last dimension. block_tables: [S, *] with row stride. out: [T, heads, V] contiguous.
extern "C" void hs_paged_attention(const void *q, int32_t q_is_bf16, int64_t q_row, int64_t q_head, const void *k, int64_t k_block, int64_t k_token,
                                   int64_t k_head, const void *v, int64_t v_block, int64_t v_token, int64_t v_head, int32_t cache_is_bf16,
                                   const int32_t *block_tables, int64_t table_stride, int64_t block_size, const int32_t *cu_seqlens,
                                   const int32_t *kv_lens, int64_t num_sequences, int64_t heads, int64_t key_heads, int64_t key_size,
                                   int64_t value_size, float scale, int64_t window, float softcap, const void *sinks, int32_t sinks_is_bf16,
                                   void *out, int32_t out_is_bf16, int32_t threads) {
    Attention a{{q, q_is_bf16 != 0},
                q_row,
                q_head,
                {k, k_block, k_token, k_head},
                {v, v_block, v_token, v_head},
                block_tables,
                table_stride,
                block_size,
                cu_seqlens,
                kv_lens,
                num_sequences,
                heads,
                key_heads,
                key_size,
                value_size,
                scale,
                window,
                softcap,
                {sinks, sinks_is_bf16 != 0},
                out,
                out_is_bf16 != 0,
                threads};
    if (cache_is_bf16)
        attend<bf16>(a, tiles_of(a));
    else
        attend<float>(a, tiles_of(a));
}

// As above without window, softcap and sinks. selected: [T, num_selected], negative for none.
extern "C" void hs_selected_attention(const void *q, int32_t q_is_bf16, int64_t q_row, int64_t q_head, const void *k, int64_t k_block,
                                      int64_t k_token, int64_t k_head, const void *v, int64_t v_block, int64_t v_token, int64_t v_head,
                                      int32_t cache_is_bf16, const int32_t *block_tables, int64_t table_stride, int64_t block_size,
                                      const int32_t *selected, int64_t num_selected, const int32_t *cu_seqlens, const int32_t *kv_lens,
                                      int64_t num_sequences, int64_t heads, int64_t key_heads, int64_t key_size, int64_t value_size,
                                      float scale, void *out, int32_t out_is_bf16, int32_t threads) {
    Attention a{{q, q_is_bf16 != 0},
                q_row,
                q_head,
                {k, k_block, k_token, k_head},
                {v, v_block, v_token, v_head},
                block_tables,
                table_stride,
                block_size,
                cu_seqlens,
                kv_lens,
                num_sequences,
                heads,
                key_heads,
                key_size,
                value_size,
                scale,
                INT64_MAX / 2,
                0.0f,
                {nullptr, false},
                out,
                out_is_bf16 != 0,
                threads};
    int64_t rows = cu_seqlens[num_sequences];
    std::vector<int32_t> named(rows * num_selected);
    std::vector<int64_t> num_named(rows);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < num_selected; i++)
            if (selected[row * num_selected + i] >= 0)
                named[row * num_selected + num_named[row]++] = selected[row * num_selected + i];
    std::vector<Tile> tiles = tiles_of_rows(a, named.data(), num_named, num_selected);
    if (cache_is_bf16)
        attend<bf16>(a, tiles);
    else
        attend<float>(a, tiles);
}

// values: [T, size] with row stride; cache: entries of `size` elements, at block and token strides; index: block * block_size + token.
extern "C" void hs_kv_write(const void *values, int32_t values_is_bf16, int64_t row_stride, void *cache, int32_t cache_is_bf16, int64_t block_stride,
                            int64_t token_stride, const int64_t *index, int64_t block_size, int64_t rows, int64_t size, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > 262144)
    for (int64_t row = 0; row < rows; row++) {
        int64_t to = index[row] / block_size * block_stride + index[row] % block_size * token_stride, from = row * row_stride;
        if (values_is_bf16 && cache_is_bf16)
            copy_entry(static_cast<const bf16 *>(values) + from, static_cast<bf16 *>(cache) + to, size);
        else if (values_is_bf16)
            copy_entry(static_cast<const bf16 *>(values) + from, static_cast<float *>(cache) + to, size);
        else if (cache_is_bf16)
            copy_entry(static_cast<const float *>(values) + from, static_cast<bf16 *>(cache) + to, size);
        else
            copy_entry(static_cast<const float *>(values) + from, static_cast<float *>(cache) + to, size);
    }
}
