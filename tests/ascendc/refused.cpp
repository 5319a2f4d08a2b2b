// What 2201 has no instruction for; none of the marked lines compiles.
#include "kernel_operator.h"

using namespace AscendC;

template <class T>
LocalTensor<T> a;

void refused() {
    Cast(a<float>, a<int8_t>, RoundMode::CAST_NONE, 32);                                   // REFUSED
    Cast(a<int8_t>, a<float>, RoundMode::CAST_RINT, 32);                                   // REFUSED
    Cast(a<int32_t>, a<int8_t>, RoundMode::CAST_NONE, 32);                                 // REFUSED
    Cast(a<int4b_t>, a<float>, RoundMode::CAST_RINT, 32);                                  // REFUSED
    Cast(a<int8_t>, a<int4b_t>, RoundMode::CAST_NONE, 32);                                 // REFUSED
    Cast(a<half>, a<bfloat16_t>, RoundMode::CAST_RINT, 32);                                // REFUSED
    Cast(a<half>, a<int32_t>, RoundMode::CAST_NONE, 32);                                   // REFUSED
    Max(a<int8_t>, a<int8_t>, a<int8_t>, 32);                                              // REFUSED
    Add(a<bfloat16_t>, a<bfloat16_t>, a<bfloat16_t>, 32);                                  // REFUSED
    Mul(a<uint32_t>, a<uint32_t>, a<uint32_t>, 32);                                        // REFUSED
    Div(a<int32_t>, a<int32_t>, a<int32_t>, 32);                                           // REFUSED
    And(a<uint32_t>, a<uint32_t>, a<uint32_t>, 32);                                        // REFUSED
    Or(a<int8_t>, a<int8_t>, a<int8_t>, 32);                                               // REFUSED
    Muls(a<uint8_t>, a<uint8_t>, uint8_t{2}, 32);                                          // REFUSED
    Maxs(a<float>, a<float>, 1, 32);                                                       // REFUSED
    Duplicate(a<int8_t>, int8_t{1}, 32);                                                   // REFUSED
    WholeReduceMax(a<int32_t>, a<int32_t>, 8, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);  // REFUSED
    Add(a<float>, a<float>, a<half>, 32);                                                  // REFUSED
    SetFlag<PIPE_V>(0);                                                                    // REFUSED
    PipeBarrier<PIPE_S>();                                                                 // REFUSED
    a<float>.NoSuchMember();                                                               // REFUSED
}
