// Operators without generated code: called through torch's dispatcher, as eager PyTorch calls them, without Python.
// calls.cpp has the code; it is linked to programs that need it.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace tilework {

struct Calls;  // the operators of one program, looked up once

// `text` is what compiler/calls.py writes. Throws where an operator is unknown to this torch.
Calls* open_calls(const char* text);

// The whole program, operator by operator.
void run_calls(Calls* calls, AtenTensorHandle* buffers);

// One operator. Its results stay with `calls` until it is called again; result `output` is copied to `out`.
void call(Calls* calls, int index, const AtenTensorHandle* inputs, int output, AtenTensorHandle out);

// The same, with the inputs one by one: what generated code passes may be a temporary object, which lives until the end of the line.
template <class Out, class... In>
static inline void call_with(Calls* calls, int index, int output, const Out& out, const In&... in) {
  const AtenTensorHandle inputs[] = {static_cast<AtenTensorHandle>(in)..., nullptr};
  call(calls, index, inputs, output, out);
}

// Another result of the operator that was called last with this index.
void result(Calls* calls, int index, int output, AtenTensorHandle out);

}  // namespace tilework
