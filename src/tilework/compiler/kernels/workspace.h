// The memory of a program: the session's buffers, which it borrows, and temporaries at places that were planned when it
// was compiled. Nothing is allocated within a step.
#pragma once
#include "vectors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace tilework {

struct Borrowed {  // a buffer of the session
  AtenTensorHandle handle;
  void* data;
  void* data_ptr() const { return data; }
  operator AtenTensorHandle() const { return handle; }
  AtenTensorHandle get() const { return handle; }
};

// A temporary. Loops and kernels use its address; a tensor object is only made, once, where a library wants one.
struct Temporary {
  char* data;
  AtenTensorHandle* kept;  // the tensor object, or null until somebody asks
  int64_t dims;
  const int64_t *shape, *stride;
  int32_t dtype;
  void* data_ptr() const { return data; }
  AtenTensorHandle get() const {
    if (!*kept && aoti_torch_create_tensor_from_blob(data, dims, shape, stride, 0, dtype, aoti_torch_device_type_cpu(), 0, kept))
      throw std::runtime_error("no tensor could be made for a temporary");
    return *kept;
  }
  operator AtenTensorHandle() const { return get(); }
  void reset() const {}
};

template <class T>
static inline float* pointer(const T& tensor) {
  return static_cast<float*>(tensor.data_ptr());
}

template <int BUFFERS, int TEMPORARIES>
struct Workspace {
  Borrowed borrowed[BUFFERS + 1] = {};
  AtenTensorHandle kept[TEMPORARIES + 1] = {};
  AtenTensorHandle* prepared_for = nullptr;
  char* memory = nullptr;
  bool lent = false;  // by the program that this is a piece of

  // Does something the first time only: a session always passes the same buffers.
  void prepare(AtenTensorHandle* buffers, size_t bytes) {
    if (prepared_for == buffers) return;
    release();
    borrow(buffers);
    memory = static_cast<char*>(aligned_alloc(64, (bytes + 127) / 64 * 64));
    if (!memory) throw std::bad_alloc();
  }
  void prepare_in(char* memory_of_program, AtenTensorHandle* buffers) {
    if (prepared_for == buffers) return;
    release();
    borrow(buffers);
    memory = memory_of_program;
    lent = true;
  }
  void borrow(AtenTensorHandle* buffers) {
    for (int i = 0; i < BUFFERS; ++i) {
      borrowed[i].handle = buffers[i];
      aoti_torch_get_data_ptr(buffers[i], &borrowed[i].data);
    }
    prepared_for = buffers;
  }
  Temporary temporary(int index, size_t offset, int64_t dims, const int64_t* shape, const int64_t* stride, int32_t dtype) {
    return {memory + offset, &kept[index], dims, shape, stride, dtype};
  }
  void release() {
    for (AtenTensorHandle& handle : kept)
      if (handle) aoti_torch_delete_tensor_object(handle), handle = nullptr;
    if (!lent) free(memory);
    memory = nullptr;
    prepared_for = nullptr;
  }
};

// For programs generated with TILEWORK_OWN_TEMPORARIES=1: each temporary is an allocation of exactly its size, with what the
// sanitizer puts around an allocation on both sides. They are kept like the one block, because tensor objects point there.
template <int BUFFERS, int TEMPORARIES>
struct SeparateWorkspace : Workspace<BUFFERS, TEMPORARIES> {
  void* places[TEMPORARIES + 1] = {};

  Temporary own_temporary(int index, size_t bytes, int64_t dims, const int64_t* shape, const int64_t* stride, int32_t dtype) {
    void*& place = places[index];
    if (!place && posix_memalign(&place, 64, bytes)) throw std::bad_alloc();
    return {static_cast<char*>(place), &this->kept[index], dims, shape, stride, dtype};
  }
  void release() {
    Workspace<BUFFERS, TEMPORARIES>::release();
    for (void*& place : places) free(place), place = nullptr;
  }
};

}  // namespace tilework
