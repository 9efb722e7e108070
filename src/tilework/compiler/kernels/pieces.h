// A program that is made of pieces: its values, and the calls that make one from another. compiler/assemble.py writes the tables.
#pragma once
#include "workspace.h"

#include <omp.h>

#include <vector>

namespace tilework {

struct PieceCode {
  void (*run)(void*& workspace, AtenTensorHandle* buffers, char* memory);  // the workspace is made at the first call
  void (*release)(void* workspace);
  const size_t* bytes;  // that it needs for a moment
};

// A value of the program: number `from` of its buffers; a temporary of `from` bytes at `offset`; a view of value `from`, `offset`
// elements on; or the number `from`.
enum class From { buffer, temporary, view, number };
struct Value {
  From kind;
  int64_t from, offset;
  int32_t dtype;
  int64_t dims;
  const int64_t *shape, *stride;
};

struct PieceCall {
  int piece, first, count;  // its operands: count numbers of values from `first`
};

// Somebody who wants to know how far the program is.
struct Watcher {
  void (*after)(void* whom, int64_t call) = nullptr;
  void* whom = nullptr;
};

// One tensor of an update, cut up so that threads get equal shares.
struct Share {
  int64_t instance, begin, end;
};

class Pieces {
 public:
  Pieces(const PieceCode* pieces, int num_pieces, const PieceCall* calls, int num_calls, const int* operands, int num_operands,
         const Value* values, int num_values, size_t bytes, bool own)
      : pieces(pieces), calls(calls), operands(operands), values(values), num_calls(num_calls), num_operands(num_operands),
        num_values(num_values), bytes(bytes), own(own) {
    for (int i = 0; i < num_pieces; ++i) scratch = std::max(scratch, *pieces[i].bytes);
  }

  void prepare(AtenTensorHandle* buffers) {
    if (prepared_for == buffers) return;
    release();
    memory = allocated(bytes + scratch);
    handles.assign(num_values, nullptr);
    for (int i = 0; i < num_values; ++i) handles[i] = made(values[i], buffers);
    arguments.clear();
    for (int i = 0; i < num_operands; ++i) arguments.push_back(handles[operands[i]]);
    workspaces.assign(num_calls, nullptr);
    prepared_for = buffers;
  }
  void run(const Watcher& watcher) {
    for (int i = 0; i < num_calls; ++i) {
      pieces[calls[i].piece].run(workspaces[i], arguments.data() + calls[i].first, memory + bytes);
      if (watcher.after) watcher.after(watcher.whom, i);
    }
  }
  void* data(int value) const {
    void* found = nullptr;
    aoti_torch_get_data_ptr(handles[value], &found);
    return found;
  }
  void release() {
    for (size_t i = 0; i < workspaces.size(); ++i)
      if (workspaces[i]) pieces[calls[i].piece].release(workspaces[i]);
    workspaces.clear();
    for (size_t i = 0; i < handles.size(); ++i)
      if (handles[i] && values[i].kind != From::buffer) aoti_torch_delete_tensor_object(handles[i]);
    handles.clear();
    for (char* block : blocks) free(block);
    blocks.clear();
    prepared_for = nullptr;
  }

 private:
  char* allocated(size_t size) {
    char* block = static_cast<char*>(aligned_alloc(64, (size + 127) / 64 * 64));
    if (!block) throw std::bad_alloc();
    blocks.push_back(block);
    return block;
  }
  AtenTensorHandle made(const Value& value, AtenTensorHandle* buffers) {
    AtenTensorHandle handle = nullptr;
    int failed = 0;
    if (value.kind == From::buffer) return buffers[value.from];
    if (value.kind == From::view) {
      failed = aoti_torch__reinterpret_tensor(handles[value.from], value.dims, value.shape, value.stride, value.offset, &handle);
    } else {
      void* data = value.kind == From::number ? const_cast<int64_t*>(&value.from)
                   : own                      ? static_cast<void*>(allocated(value.from))
                                              : static_cast<void*>(memory + value.offset);
      failed = aoti_torch_create_tensor_from_blob(data, value.dims, value.shape, value.stride, 0, value.dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle);
    }
    if (failed) throw std::runtime_error("no tensor could be made for a value between the pieces of a program");
    return handle;
  }

  const PieceCode* pieces;
  const PieceCall* calls;
  const int* operands;
  const Value* values;
  const int num_calls, num_operands, num_values;
  const size_t bytes;  // of all temporaries
  const bool own;      // each temporary is an allocation of its own
  size_t scratch = 0;  // of one piece at a time
  char* memory = nullptr;
  AtenTensorHandle* prepared_for = nullptr;
  std::vector<char*> blocks;
  std::vector<AtenTensorHandle> handles, arguments;
  std::vector<void*> workspaces;
};

// The same update of many tensors: of each the addresses of its tensors, then of its scalars.
struct UpdateTable {
  const int* values;      // num_tensors + num_scalars of each instance
  const int64_t* numels;  // elements of each instance
  int num_instances, num_tensors, num_scalars;
};

using Update = void (*)(float* const* tensors, void* const* scalars, int64_t begin, int64_t end);

class Updates {
 public:
  void prepare(const Pieces& pieces, const UpdateTable& table) {
    addresses.clear();
    shares.clear();
    elements = 0;
    each = table.num_tensors + table.num_scalars;
    num_tensors = table.num_tensors;
    for (int i = 0; i < table.num_instances * each; ++i) addresses.push_back(pieces.data(table.values[i]));
    for (int i = 0; i < table.num_instances; ++i, elements += table.numels[i - 1])
      for (int64_t begin = 0; begin < table.numels[i]; begin += kChunk)
        shares.push_back({i, begin, std::min(begin + kChunk, table.numels[i])});
  }
  void run(Update update) const {
    const int threads = std::max<int64_t>(1, std::min<int64_t>(omp_get_max_threads(), elements / kWorthAThread));
    const int64_t count = shares.size();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) {
      void* const* mine = addresses.data() + shares[i].instance * each;
      update(reinterpret_cast<float* const*>(mine), mine + num_tensors, shares[i].begin, shares[i].end);
    }
  }

 private:
  static constexpr int64_t kChunk = 16384, kWorthAThread = 16384;  // elements
  std::vector<void*> addresses;
  std::vector<Share> shares;
  int64_t elements = 0, each = 0, num_tensors = 0;
};

}  // namespace tilework
