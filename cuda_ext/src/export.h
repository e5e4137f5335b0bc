// How a function of the C interface is declared.
#pragma once

#define SPECTER_API extern "C" __attribute__((visibility("default")))
