/// \file hot.h
/// \brief What every small call runs through.
#pragma once

/// Laid next to each other by the compiler. Ranks that take turns on a processor find its caches full of the others',
/// so that a call is as long as the lines and pages of code that it touches.
#define ALLTOALLV_HOT __attribute__((hot))
