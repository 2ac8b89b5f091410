// Where the states of a batch are read and written: the two rules that every state operation obeys.
//
// NO_SLOT means zeros whatever the pool holds, and all reads come before any write. Knows slots and rows; not what a state is.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "numeric.h"

namespace hybridserve {

struct Sequence {
    int64_t row, end;               // its rows in the batch
    const char *start;              // the state to start from, or null for zeros
    int64_t first_write, end_write; // its entries in write_rows and write_slots
};

struct StateTable {
    const int32_t *cu_seqlens;  // [num_sequences + 1]
    const int64_t *start_slots; // [num_sequences], negative for none
    const int64_t *write_rows;  // [num_writes], ascending
    const int64_t *write_slots;
    int64_t num_sequences, num_writes;
};

class Slots {
  public:
    // pool: slots of `nbytes`, `stride` bytes apart. Start states that another sequence's write would destroy are copied here, and those
    // of sequences with more than `max_rows` rows, which are not taken in one go.
    // `table` must outlive it.
    Slots(const StateTable &table, char *pool, int64_t stride, int64_t nbytes, int64_t max_rows = INT64_MAX)
        : table_(table), pool_(pool), stride_(stride) {
        int64_t write = 0;
        for (int64_t s = 0; s < table.num_sequences; s++) {
            Sequence sequence{table.cu_seqlens[s], table.cu_seqlens[s + 1], nullptr, write, write};
            while (write < table.num_writes && table.write_rows[write] < sequence.end)
                write++;
            sequence.end_write = write;
            if (table.start_slots[s] >= 0)
                sequence.start = pool + table.start_slots[s] * stride;
            sequences.push_back(sequence);
        }
        for (Sequence &sequence : sequences)
            if (sequence.end - sequence.row > max_rows && sequence.start != nullptr)
                save(sequence, nbytes);
        if (table.num_sequences > 1)
            save_overwritten(nbytes);
    }

    char *target(int64_t write) const { return pool_ + table_.write_slots[write] * stride_; }
    int64_t write_row(int64_t write) const { return table_.write_rows[write]; }

    std::vector<Sequence> sequences;

  private:
    void save(Sequence &sequence, int64_t nbytes) {
        saved_.emplace_back(sequence.start, sequence.start + nbytes);
        sequence.start = saved_.back().data();
    }

    void save_overwritten(int64_t nbytes) {
        std::vector<std::pair<const char *, int64_t>> writers;
        for (int64_t s = 0; s < table_.num_sequences; s++)
            for (int64_t w = sequences[s].first_write; w < sequences[s].end_write; w++)
                writers.emplace_back(target(w), s);
        std::sort(writers.begin(), writers.end());
        for (int64_t s = 0; s < table_.num_sequences; s++) {
            Sequence &reader = sequences[s];
            if (reader.start == nullptr)
                continue;
            auto writer = std::lower_bound(writers.begin(), writers.end(), std::make_pair(reader.start, int64_t(0)));
            for (; writer != writers.end() && writer->first == reader.start; ++writer)
                if (writer->second != s) {
                    save(reader, nbytes);
                    break;
                }
        }
    }

    const StateTable &table_;
    char *pool_;
    int64_t stride_;
    std::vector<std::vector<char>> saved_;
};

} // namespace hybridserve
